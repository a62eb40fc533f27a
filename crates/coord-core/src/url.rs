//! Backend URLs, parsed once and printed without secrets.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use crate::error::{Error, ErrorKind, Result};
use crate::quote::quoted;
use crate::types::{ClusterName, Era, is_host, parse_port};

/// The longest URL, in bytes.
pub const URL_BYTES_MAX: usize = 8 * 1024;
/// The options that every backend knows.
pub const COMMON_OPTIONS: &[&str] = &["era", WAIT_FOR_STORE];
/// The option that says how long to wait for a store that is not there yet.
pub(crate) const WAIT_FOR_STORE: &str = "wait_for_store";
/// The scheme of the memory backend.
pub(crate) const MEMORY_SCHEME: &str = "memory";

const TIMEOUT_MIN: Duration = Duration::from_millis(100);
const TIMEOUT_MAX: Duration = Duration::from_secs(60);
const WAIT_MAX: Duration = Duration::from_secs(24 * 60 * 60);
/// What an option's name holds if its value must not be shown.
const SECRET_WORDS: &[&str] = &["auth", "cred", "jwt", "key", "pass", "secret", "seed", "token"];
/// What is encoded when a URL is printed.
const ENCODED: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');
/// What stands for a secret.
const REDACTED: &str = "***";
const SHAPE: &str = "write scheme://[user[:password]@]host[:port][,host…]/cluster[?option=value&…]";

/// Which store to open, and for which cluster:
/// `scheme://[user[:password]@]host[:port][,host[:port]…]/cluster[?option=value&…]`, or
/// `memory://cluster`.
///
/// In the user, the password and the options, `%xx` stands for a byte; the characters `@ / ? #`
/// have to be written so there, and `&` in an option. Neither `Display` nor `Debug` nor an error
/// shows a secret: all that stands before the `@` (some stores take a token for a user), and the
/// value of an option whose name speaks of a token, a password, a secret, a key or the like.
///
/// ```
/// # use coord_core::BackendUrl;
/// let url: BackendUrl = "etcd://root:s3cret@a:2379,b:2379/orders?era=2".parse().unwrap();
/// assert_eq!(url.hosts().len(), 2);
/// assert_eq!(url.cluster().as_str(), "orders");
/// assert_eq!(url.to_string(), "etcd://***@a:2379,b:2379/orders?era=2");
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct BackendUrl {
    scheme: String,
    user: Option<Secret>,
    password: Option<Secret>,
    hosts: Vec<UrlHost>,
    cluster: ClusterName,
    options: BTreeMap<String, String>,
}

/// One host of a URL.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UrlHost {
    /// A name, an IPv4 address, or an IPv6 address in brackets.
    pub host: String,
    /// The port; the backend's usual one if there is none.
    pub port: Option<u16>,
}

/// A text that is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<str>);

/// The options of a URL, all of them known.
#[derive(Clone, Copy, Debug)]
pub struct UrlOptions<'a> {
    url: &'a BackendUrl,
}

impl BackendUrl {
    /// Parses a URL, without looking anything up.
    ///
    /// # Errors
    /// `Invalid`, naming the part and what would be right. The message holds no secret.
    pub fn parse(text: &str) -> Result<Self> {
        if text.len() > URL_BYTES_MAX {
            let why = format!("the URL has {} bytes; at most {URL_BYTES_MAX}", text.len());
            return Err(invalid(why));
        }
        let Some((scheme, rest)) = text.split_once("://") else {
            return Err(invalid(format!("the URL has no \"://\"; {SHAPE}")));
        };
        let scheme = parse_scheme(scheme)?;
        // Looked at before all else: what stands before a misplaced one may be part of a password.
        if rest.contains('#') {
            return Err(invalid("the URL holds '#'; write %23"));
        }
        let (authority, tail) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
        let (userinfo, hosts) = match authority.rsplit_once('@') {
            Some((userinfo, hosts)) => (Some(userinfo), hosts),
            None => (None, authority),
        };
        if tail.contains('@') || userinfo.is_some_and(|info| info.contains('@')) {
            let why = "the URL holds '@' beside the one before the hosts, or a user or password \
                       with '/' or '?'; write %40, %2F and %3F";
            return Err(invalid(why));
        }
        let (user, password) = userinfo.map_or(Ok((None, None)), parse_userinfo)?;
        let (path, query) = match tail.split_once('?') {
            Some((path, query)) => (path, Some(query)),
            None => (tail, None),
        };
        let (hosts, cluster) = if scheme == MEMORY_SCHEME {
            (Vec::new(), parse_memory_cluster(hosts, path)?)
        } else {
            (parse_hosts(hosts)?, parse_cluster(path)?)
        };
        let options = query.map_or_else(|| Ok(BTreeMap::new()), parse_options)?;
        Ok(Self { scheme, user, password, hosts, cluster, options })
    }

    /// The scheme, in lower case.
    #[must_use]
    pub fn scheme(&self) -> &str {
        &self.scheme
    }

    /// The user, decoded. Some stores take a token there: it is a secret as well.
    #[must_use]
    pub fn user(&self) -> Option<&Secret> {
        self.user.as_ref()
    }

    /// The password, decoded.
    #[must_use]
    pub fn password(&self) -> Option<&Secret> {
        self.password.as_ref()
    }

    /// The hosts, in order; none where the URL names none.
    #[must_use]
    pub fn hosts(&self) -> &[UrlHost] {
        &self.hosts
    }

    /// The cluster.
    #[must_use]
    pub fn cluster(&self) -> &ClusterName {
        &self.cluster
    }

    /// Whether the value of an option of this name is never shown: code that shows a text which may hold a URL
    /// has to hide it as well.
    #[must_use]
    pub fn hides(option: &str) -> bool {
        is_secret(option)
    }

    /// The options, if all of them are [common](COMMON_OPTIONS) ones or among `known`.
    ///
    /// # Errors
    /// `Unsupported`, naming the option and all that are known.
    pub fn options(&self, known: &[&str]) -> Result<UrlOptions<'_>> {
        let mut known: Vec<_> = known.iter().chain(COMMON_OPTIONS).copied().collect();
        if let Some(odd) = self.options.keys().find(|name| !known.contains(&name.as_str())) {
            known.sort_unstable();
            known.dedup();
            let (odd, known) = (quoted(odd), known.join(", "));
            let why = format!("unknown option {odd}; the known ones are {known}");
            return Err(Error::new(ErrorKind::Unsupported, "connect").message(why).resource(self));
        }
        Ok(UrlOptions { url: self })
    }
}

impl<'a> UrlOptions<'a> {
    /// The value of an option, decoded.
    #[must_use]
    pub fn get(self, name: &str) -> Option<&'a str> {
        self.url.options.get(name).map(String::as_str)
    }

    /// The value of an option that must not be printed.
    #[must_use]
    pub fn secret(self, name: &str) -> Option<Secret> {
        self.get(name).map(Secret::new)
    }

    /// The value of an option, parsed.
    ///
    /// # Errors
    /// `Invalid`, naming the option, its value unless that is a secret, and `wanted`, which says in
    /// words what would be right.
    pub fn parse<T: FromStr>(self, name: &str, wanted: &str) -> Result<Option<T>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.parse().map(Some).map_err(|_| {
            let shown = if is_secret(name) { REDACTED } else { value };
            let why = format!("option {name} is {}; it is {wanted}", quoted(shown));
            invalid(why).resource(self.url)
        })
    }

    /// A time limit, written as `500ms` or `5s`; `usual` unless it is set.
    ///
    /// # Errors
    /// `Invalid` unless it is 100 ms to 60 s.
    pub fn timeout(self, name: &str, usual: Duration) -> Result<Duration> {
        let wanted = "100ms to 60s, written as 500ms or 5s";
        Ok(self.parse::<Timeout>(name, wanted)?.map_or(usual, |timeout| timeout.0))
    }

    /// How long to wait for a store that is not there yet, if the URL says so.
    ///
    /// # Errors
    /// `Invalid` unless it is 0 s to 24 h.
    pub fn wait_for_store(self) -> Result<Option<Duration>> {
        let wanted = "0s to 24h, written as 500ms, 30s, 5m or 1h";
        Ok(self.parse::<Wait>(WAIT_FOR_STORE, wanted)?.map(|wait| wait.0))
    }

    /// The era, 0 unless it is set.
    ///
    /// # Errors
    /// `Invalid` unless it is 0 to 4095.
    pub fn era(self) -> Result<Era> {
        Ok(self.parse("era", "a number of 0 to 4095")?.unwrap_or_default())
    }
}

struct Timeout(Duration);

impl FromStr for Timeout {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let timeout = parse_time(text, &["ms", "s"])?;
        (TIMEOUT_MIN..=TIMEOUT_MAX).contains(&timeout).then_some(Self(timeout)).ok_or(())
    }
}

struct Wait(Duration);

impl FromStr for Wait {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let wait = parse_time(text, &["ms", "s", "m", "h"])?;
        (wait <= WAIT_MAX).then_some(Self(wait)).ok_or(())
    }
}

fn parse_time(text: &str, units: &[&str]) -> Result<Duration, ()> {
    let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).ok_or(())?);
    let number: u64 = digits.parse().map_err(drop)?;
    let millis = match unit {
        unit if !units.contains(&unit) => return Err(()),
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        _ => 3_600_000,
    };
    number.checked_mul(millis).map(Duration::from_millis).ok_or(())
}

impl UrlHost {
    /// A host of its parts.
    #[must_use]
    pub fn new(host: impl Into<String>, port: Option<u16>) -> Self {
        Self { host: host.into(), port }
    }
}

impl Secret {
    /// Keeps a text from being printed.
    #[must_use]
    pub fn new(text: impl AsRef<str>) -> Self {
        Self(text.as_ref().into())
    }

    /// The text itself, for the one place that needs it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(REDACTED)
    }
}

impl FromStr for BackendUrl {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        Self::parse(text)
    }
}

impl fmt::Display for UrlHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.host)?;
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

impl fmt::Display for BackendUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://", self.scheme)?;
        if self.user.is_some() || self.password.is_some() {
            write!(f, "{REDACTED}@")?;
        }
        for (index, host) in self.hosts.iter().enumerate() {
            write!(f, "{}{host}", if index == 0 { "" } else { "," })?;
        }
        write!(f, "{}{}", if self.scheme == MEMORY_SCHEME { "" } else { "/" }, self.cluster)?;
        for (index, (name, value)) in self.options.iter().enumerate() {
            write!(f, "{}{name}=", if index == 0 { '?' } else { '&' })?;
            if is_secret(name) {
                f.write_str(REDACTED)?;
            } else {
                write!(f, "{}", utf8_percent_encode(value, ENCODED))?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for BackendUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BackendUrl({self})")
    }
}

fn invalid(why: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::invalid("parse URL", why)
}

fn is_secret(option: &str) -> bool {
    SECRET_WORDS.iter().any(|word| option.contains(word))
}

/// Checks a scheme and puts it into lower case.
pub(crate) fn parse_scheme(text: &str) -> Result<String> {
    if !text.starts_with(|c: char| c.is_ascii_alphabetic()) {
        return Err(invalid(format!("the scheme does not begin with a letter; {SHAPE}")));
    }
    let odd = |c: &char| !(c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'));
    if let Some(odd) = text.chars().find(odd) {
        return Err(invalid(format!("the scheme holds {odd:?}; allowed are a-z 0-9 + - .")));
    }
    Ok(text.to_ascii_lowercase())
}

fn parse_userinfo(text: &str) -> Result<(Option<Secret>, Option<Secret>)> {
    let (user, password) = match text.split_once(':') {
        Some((user, password)) => (user, Some(decode("the password", password)?)),
        None => (text, None),
    };
    let user = (!user.is_empty()).then(|| decode("the user", user)).transpose()?;
    if user.is_none() && password.is_none() {
        return Err(invalid("the URL has '@' and no user before it; leave the '@' out"));
    }
    Ok((user.map(Secret::new), password.map(Secret::new)))
}

/// Decodes `%xx`, strictly; the message does not show the text.
fn decode(what: &str, text: &str) -> Result<String> {
    let is_hex = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_hexdigit);
    let bytes = text.as_bytes();
    let is_escape = |at: usize| is_hex(bytes.get(at + 1)) && is_hex(bytes.get(at + 2));
    if text.match_indices('%').any(|(at, _)| !is_escape(at)) {
        return Err(invalid(format!("{what} holds a '%' without two hex digits; write %25")));
    }
    match percent_decode_str(text).decode_utf8() {
        Ok(decoded) => Ok(decoded.into_owned()),
        Err(_) => Err(invalid(format!("{what} is not UTF-8 once it is decoded"))),
    }
}

/// None where the text is empty. A port is not shown: where the `@` was forgotten it is a password.
fn parse_hosts(text: &str) -> Result<Vec<UrlHost>> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    let parse = |(index, text): (usize, &str)| {
        let fail = |why: &str| Err(invalid(format!("host number {} {why}", index + 1)));
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) if !port.contains(']') => (host, Some(port)),
            _ => (text, None),
        };
        if !is_host(host) {
            return fail("is malformed; write a name, an IPv4 address or [an IPv6 address]");
        }
        match port.map(parse_port) {
            Some(None) => fail(&format!("({}) has a port that is not 1 to 65535", quoted(host))),
            port => Ok(UrlHost::new(host, port.flatten())),
        }
    };
    text.split(',').enumerate().map(parse).collect()
}

fn parse_cluster(path: &str) -> Result<ClusterName> {
    let name = path.strip_prefix('/').unwrap_or_default();
    if name.is_empty() {
        // The host is not shown: where the `@` was forgotten it is a user.
        let why = format!(
            "the URL names no cluster; {SHAPE}; where no host is named there are three slashes, \
             scheme:///cluster"
        );
        return Err(invalid(why));
    }
    if name.contains('/') {
        let path = quoted(path);
        let why = format!("the URL's path {path} is not one cluster name; {SHAPE}");
        return Err(invalid(why));
    }
    ClusterName::new(name)
}

/// The cluster of a `memory:` URL, which stands where others have their hosts.
fn parse_memory_cluster(authority: &str, path: &str) -> Result<ClusterName> {
    if authority.is_empty() || authority.contains(':') || !path.is_empty() {
        let why = "a memory URL is one cluster name and nothing else; write memory://cluster";
        return Err(invalid(why));
    }
    ClusterName::new(authority)
}

fn parse_options(query: &str) -> Result<BTreeMap<String, String>> {
    let mut options = BTreeMap::new();
    for (index, pair) in query.split('&').enumerate() {
        let number = index + 1;
        let Some((name, value)) = pair.split_once('=') else {
            return Err(invalid(format!("option number {number} has no value; write name=value")));
        };
        let good = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-_".contains(&b);
        if name.is_empty() || !name.bytes().all(good) {
            let why = format!("option number {number} has a name that is not of a-z 0-9 - _");
            return Err(invalid(why));
        }
        let value = decode(&format!("option {name}"), value)?;
        if options.insert(name.to_owned(), value).is_some() {
            return Err(invalid(format!("option {name} is given twice; give it once")));
        }
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_url_is_taken_apart() {
        let text = "Redis://us%40er:p%2Fw@a:6379,[::1]:7000,c/orders?tls=on&ca=/etc/ca&token=t%20t";
        let url = BackendUrl::parse(text).expect("parses");
        assert_eq!(url.scheme(), "redis");
        assert_eq!(url.user().map(Secret::expose), Some("us@er"));
        assert_eq!(url.password().map(Secret::expose), Some("p/w"));
        let hosts = [("a", Some(6379)), ("[::1]", Some(7000)), ("c", None)];
        assert_eq!(url.hosts(), hosts.map(|(host, port)| UrlHost::new(host, port)));
        assert_eq!(url.cluster().as_str(), "orders");
        let options = url.options(&["tls", "token", "ca"]).expect("known");
        assert_eq!((options.get("tls"), options.get("other")), (Some("on"), None));
        assert_eq!(options.secret("token").as_ref().map(Secret::expose), Some("t t"));
        let shown = "redis://***@a:6379,[::1]:7000,c/orders?ca=/etc/ca&tls=on&token=***";
        assert_eq!(url.to_string(), shown);
        assert_eq!(format!("{url:?}"), format!("BackendUrl({shown})"));

        let memory = BackendUrl::parse("memory://orders").expect("parses");
        assert_eq!((memory.hosts(), memory.to_string().as_str()), (&[][..], "memory://orders"));
        let kube = BackendUrl::parse("kube:///orders").expect("hosts may be left out");
        assert_eq!((kube.hosts(), kube.to_string().as_str()), (&[][..], "kube:///orders"));
    }

    #[test]
    fn a_bad_url_is_refused_by_its_part_without_its_secrets() {
        for (text, part) in [
            ("", "\"://\""),
            ("orders", "\"://\""),
            ("hunter2", "\"://\""),
            ("u:hunter2@://h/c", "scheme holds ':'"),
            ("://a/orders", "begin with a letter"),
            ("etcd://a:2379", "no cluster"),
            ("etcd://a:2379/", "no cluster"),
            ("kube://orders", "three slashes, scheme:///cluster"),
            ("nats://hunter2", "no cluster"),
            ("etcd://a/b/c", "\"/b/c\""),
            ("etcd://a/Orders", "\"Orders\""),
            ("etcd://a:0/c", "host number 1 (\"a\") has a port"),
            ("etcd://a,b:+1/c", "host number 2 (\"b\") has a port"),
            ("etcd://u:hunter2/c", "host number 1 (\"u\") has a port"),
            ("etcd://a,,b/c", "host number 2"),
            ("etcd://[::g]:1/c", "host number 1"),
            ("etcd://u:hunter2/x@a/c", "%2F"),
            ("etcd://u:hunter2?x@a/c", "%3F"),
            ("etcd://u:hunter2@x@a/c", "%40"),
            ("etcd://u:hunter2#x@a/c", "%23"),
            ("etcd://u:hunter2%zz@a/c", "the password holds a '%'"),
            ("etcd://u:hunter2%ff@a/c", "the password is not UTF-8"),
            ("etcd://@a/c", "no user"),
            ("etcd://a/c?era", "option number 1 has no value"),
            ("etcd://a/c?x=1&", "option number 2 has no value"),
            ("etcd://a/c?hunter2", "option number 1 has no value"),
            ("etcd://a/c?=1", "option number 1 has a name"),
            ("etcd://a/c?era=1&era=2", "option era is given twice"),
            ("etcd://a/c?token=hunter2&token=hunter2", "option token is given twice"),
            ("memory://", "memory://cluster"),
            ("memory:///orders", "memory://cluster"),
            ("memory://u:hunter2", "memory://cluster"),
            ("memory://a/b", "memory://cluster"),
        ] {
            let error = BackendUrl::parse(text).expect_err(text);
            assert_eq!(error.kind(), ErrorKind::Invalid, "{text}");
            assert!(error.to_string().contains(part), "{text}: {error}");
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{text}: {error}");
        }
        assert!(BackendUrl::parse(&format!("etcd://{}/c", "a".repeat(URL_BYTES_MAX))).is_err());
    }

    #[test]
    fn options_are_known_and_parsed_or_refused() {
        let url =
            BackendUrl::parse("etcd://hunter2@a/c?era=7&tsl=on&api_key=hunter2").expect("url");
        let error = url.options(&["tls", "api_key"]).expect_err("a typing error");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("\"tsl\"; the known ones are api_key, era, tls"));
        let options = url.options(&["tsl", "api_key"]).expect("known");
        assert_eq!(options.era().expect("era").get(), 7);
        let odd = options.parse::<u16>("tsl", "a number").expect_err("not a number");
        assert!(odd.to_string().contains("option tsl is \"on\"; it is a number"), "{odd}");
        let secret = options.parse::<u16>("api_key", "a number").expect_err("not a number");
        for text in [error.to_string(), secret.to_string(), format!("{url:?} {options:?}")] {
            assert!(!text.contains("hunter2"), "{text}");
        }
        let waits =
            [("0s", 0), ("500ms", 500), ("30s", 30_000), ("5m", 300_000), ("24h", 86_400_000)];
        for (text, millis) in waits {
            let url = BackendUrl::parse(&format!("memory://c?wait_for_store={text}")).expect("url");
            let wait = url.options(&[]).expect("known").wait_for_store().expect(text);
            assert_eq!(wait, Some(Duration::from_millis(millis)), "{text}");
        }
        for text in ["25h", "-1s", "1", "s", "", "1d", "99999999999999999999s", "9999999999999999h"]
        {
            let url = BackendUrl::parse(&format!("memory://c?wait_for_store={text}")).expect("url");
            let error = url.options(&[]).expect("known").wait_for_store().expect_err(text);
            assert!(error.to_string().contains("0s to 24h"), "{error}");
        }
        for era in ["4096", "-1", "x", ""] {
            let url = BackendUrl::parse(&format!("memory://c?era={era}")).expect("url");
            let error = url.options(&[]).expect("known").era().expect_err(era);
            assert!(error.to_string().contains("0 to 4095"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(
            text in "\\PC{0,40}",
            tail in "[a-z:/?#@%=&,.0-9\\[\\]]{0,40}",
        ) {
            for text in [text.clone(), format!("etcd://{tail}"), format!("{text}://{tail}{text}")] {
                if let Ok(url) = BackendUrl::parse(&text) {
                    // What is printed parses again and prints the same.
                    let shown = url.to_string();
                    prop_assert_eq!(BackendUrl::parse(&shown).expect("parses").to_string(), shown);
                }
            }
        }

        #[test]
        fn no_secret_is_ever_printed(before in "\\PC{0,9}", after in "\\PC{0,9}", encode: bool) {
            let secret = format!("{before}hunter2{after}");
            let secret = if encode {
                utf8_percent_encode(&secret, NON_ALPHANUMERIC).to_string()
            } else {
                secret
            };
            for text in [
                format!("redis://user:{secret}@a:6379/orders"),
                format!("redis://:{secret}@a,b/orders?tls=on"),
                format!("nats://{secret}@a/orders"),
                format!("nats://a/orders?tls=on&auth_token={}", secret.replace('&', "%26")),
            ] {
                let shown = match BackendUrl::parse(&text) {
                    Ok(url) => format!("{url} {url:?} {:?}", url.options(&[])),
                    Err(error) => format!("{error} {error:?}"),
                };
                prop_assert!(!shown.contains("hunter2"), "{} shows as {}", text, shown);
            }
        }
    }
}

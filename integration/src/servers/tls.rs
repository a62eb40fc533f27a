//! A certificate authority for one test, and a server's certificate by it.

use std::fs;
use std::io;
use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

use super::start::Certificate;

/// Writes the authority's certificate, and one for 127.0.0.1 and localhost that it signed. The latter
/// must not be an authority itself: rustls refuses that.
pub(super) fn write(authority: &Path, files: &Certificate) -> io::Result<()> {
    let made = make().map_err(io::Error::other)?;
    fs::write(authority, made.authority)?;
    fs::write(&files.certificate, made.certificate)?;
    fs::write(&files.key, made.key)
}

struct Made {
    authority: String,
    certificate: String,
    key: String,
}

fn make() -> Result<Made, rcgen::Error> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, "coord test authority");
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
    let key = KeyPair::generate()?;
    let names = ["127.0.0.1", "localhost"].map(str::to_owned);
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name.push(DnType::CommonName, "coord test server");
    params.is_ca = IsCa::ExplicitNoCa;
    let certificate = params.signed_by(&key, &authority)?;
    Ok(Made {
        authority: authority.pem(),
        certificate: certificate.pem(),
        key: key.serialize_pem(),
    })
}

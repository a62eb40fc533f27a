//! As much of Redis's protocol as it takes to ask a server how it is.

use std::io::{self, BufRead, BufReader, Read, Write as _};

use super::Login;

const LENGTH_MAX: usize = 1 << 20;

/// What a command is answered, each string and number on a line of its own.
pub(super) fn ask(address: &str, login: Option<&Login>, command: &[&str]) -> io::Result<String> {
    let mut stream = super::http::connect(address)?;
    let mut answers = BufReader::new(stream.try_clone()?);
    if let Some(Login { user, password }) = login {
        stream.write_all(&encoded(&["AUTH", user, password]))?;
        read(&mut answers, &mut String::new())?;
    }
    stream.write_all(&encoded(command))?;
    let mut text = String::new();
    read(&mut answers, &mut text)?;
    Ok(text)
}

fn encoded(command: &[&str]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", command.len()).into_bytes();
    for word in command {
        bytes.extend(format!("${}\r\n{word}\r\n", word.len()).into_bytes());
    }
    bytes
}

fn read(from: &mut impl BufRead, text: &mut String) -> io::Result<()> {
    let mut line = String::new();
    from.take(LENGTH_MAX as u64).read_line(&mut line)?;
    let line = line.trim_end();
    let odd = || io::Error::new(io::ErrorKind::InvalidData, format!("not Redis's: {line:?}"));
    let kind = line.chars().next().ok_or_else(odd)?;
    let rest = &line[kind.len_utf8()..];
    match kind {
        '-' => return Err(io::Error::other(rest.to_owned())),
        '+' | ':' => *text += &format!("{rest}\n"),
        '$' | '*' if rest.starts_with('-') => text.push('\n'),
        '$' => {
            let length = rest.parse::<usize>().ok().filter(|length| *length <= LENGTH_MAX);
            let mut bytes = vec![0; length.ok_or_else(odd)? + 2];
            from.read_exact(&mut bytes)?;
            bytes.truncate(bytes.len() - 2);
            *text += &format!("{}\n", String::from_utf8_lossy(&bytes));
        }
        '*' => {
            for _ in 0..rest.parse::<usize>().map_err(|_| odd())? {
                read(from, text)?;
            }
        }
        _ => return Err(odd()),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(bytes: &str) -> io::Result<String> {
        let mut text = String::new();
        read(&mut bytes.as_bytes(), &mut text).map(|()| text)
    }

    #[test]
    fn answers_are_lines() {
        assert_eq!(answer("+PONG\r\n").expect("simple"), "PONG\n");
        assert_eq!(answer("*3\r\n$2\r\nab\r\n:7\r\n$-1\r\n").expect("nested"), "ab\n7\n\n");
        assert_eq!(answer("-NOAUTH no\r\n").expect_err("refused").to_string(), "NOAUTH no");
        for odd in ["", "HTTP/1.1 400\r\n", "$x\r\n", "$9999999999\r\n", "$9\r\nshort"] {
            assert!(answer(odd).is_err(), "{odd:?}");
        }
    }
}

//! NBD URIs: `nbd://HOST[:PORT]/EXPORT` and `nbd+unix:///EXPORT?socket=PATH`.

use std::fmt;
use std::path::PathBuf;

use percent_encoding::percent_decode_str;

/// The port registered for NBD.
const PORT: u16 = 10809;

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// TCP.
    Tcp {
        /// Host name or IP address, without brackets.
        host: String,
        /// Port.
        port: u16,
    },
    /// A Unix socket.
    Unix(PathBuf),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Where a server listens, and the export to test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Location {
    /// Where the server listens.
    pub address: Address,
    /// Name of the export; empty for the default export.
    pub export: String,
}

/// Parses an NBD URI.
///
/// # Errors
/// An error message for the user.
pub fn parse(uri: &str) -> Result<Location, String> {
    let (scheme, rest) = uri.split_once(':').ok_or_else(|| {
        format!("{uri}: not an NBD URI; write nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH")
    })?;
    let rest =
        rest.strip_prefix("//").ok_or_else(|| format!("{uri}: // is missing after {scheme}:"))?;
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let export = decode(uri, path)?;
    let address = match scheme {
        "nbd" => tcp(uri, authority)?,
        "nbd+unix" => {
            let socket = query
                .split('&')
                .find_map(|pair| pair.strip_prefix("socket="))
                .ok_or_else(|| format!("{uri}: ?socket=PATH is missing"))?;
            Address::Unix(decode(uri, socket)?.into())
        }
        "nbds" | "nbds+unix" => return Err(format!("{uri}: TLS is not supported by this kit")),
        _ => return Err(format!("{uri}: scheme {scheme} is neither nbd nor nbd+unix")),
    };
    Ok(Location { address, export })
}

fn tcp(uri: &str, authority: &str) -> Result<Address, String> {
    let (host, port) = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, port)) => (host, port.strip_prefix(':')),
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    let port = match port {
        Some(port) => port.parse().map_err(|_| format!("{uri}: {port} is not a port"))?,
        None => PORT,
    };
    let host = if host.is_empty() { "localhost" } else { host };
    Ok(Address::Tcp { host: host.to_owned(), port })
}

fn decode(uri: &str, text: &str) -> Result<String, String> {
    percent_decode_str(text)
        .decode_utf8()
        .map(std::borrow::Cow::into_owned)
        .map_err(|_| format!("{uri}: {text} is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, port: u16) -> Address {
        Address::Tcp { host: host.to_owned(), port }
    }

    #[test]
    fn addresses_and_names() {
        let cases = [
            ("nbd://example.org/disk", tcp("example.org", 10809), "disk"),
            ("nbd://example.org:99", tcp("example.org", 99), ""),
            ("nbd://[::1]:99/a/b", tcp("::1", 99), "a/b"),
            ("nbd:///x%20y", tcp("localhost", 10809), "x y"),
            ("nbd+unix:///e?socket=/run/a%3Fb", Address::Unix("/run/a?b".into()), "e"),
            ("nbd+unix://?socket=/run/s", Address::Unix("/run/s".into()), ""),
        ];
        for (uri, address, export) in cases {
            let location = Location { address, export: export.to_owned() };
            assert_eq!(parse(uri), Ok(location), "{uri}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        for uri in ["disk", "nbd:disk", "http://x/", "nbds://x/", "nbd+unix:///e", "nbd://h:99999/"]
        {
            let error = parse(uri).expect_err(uri);
            assert!(error.starts_with(uri), "{error}");
        }
    }
}

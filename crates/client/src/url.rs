//! URLs of remote files: `towline://HOST[:PORT]/EXPORT/PATH` and its variants.
//!
//! `towline:` connects by TCP and moves to shared memory if the server is on the same machine;
//! `towline+tcp:` stays on TCP. `towline+unix:///EXPORT/PATH?socket=/run/towline.sock` uses a Unix
//! socket; `towline+shm:` connects in the same way and then moves to shared memory. Bytes that a
//! URL cannot contain are percent-encoded; names are bytes, not text.

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, percent_encode};
use std::fmt;
use std::path::PathBuf;
use towline_wire::limits::DEFAULT_PORT;

/// How to reach a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Transport {
    /// TCP to a host name or address, and port; then shared memory if the server is on this
    /// machine.
    Nearest(String, u16),
    /// TCP to a host name or address, and port.
    Tcp(String, u16),
    /// A Unix socket.
    Unix(PathBuf),
    /// Shared memory, set up through a Unix socket.
    Shm(PathBuf),
}

/// A remote file, directory, export (empty path) or server (empty export).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    /// How to reach the server.
    pub transport: Transport,
    /// Name of the export.
    pub export: Vec<u8>,
    /// Path inside the export, without a leading slash.
    pub path: Vec<u8>,
}

/// Characters encoded in paths: all but the unreserved ones and the slash.
const ENCODED: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'#')
    .add(b'%')
    .add(b'<')
    .add(b'>')
    .add(b'?')
    .add(b'[')
    .add(b'\\')
    .add(b']')
    .add(b'^')
    .add(b'`')
    .add(b'{')
    .add(b'|')
    .add(b'}');

/// In the name of an export, a slash would begin the path.
const ENCODED_NAME: &AsciiSet = &ENCODED.add(b'/');

impl Url {
    /// True if `text` starts like a Towline URL, and so is not meant as a local path.
    #[must_use]
    pub fn looks_like(text: &str) -> bool {
        text.starts_with("towline:") || text.starts_with("towline+")
    }

    /// Parses a URL.
    ///
    /// # Errors
    /// A sentence that says what is wrong with it and what is expected.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = |what: &str| {
            format!(
                "URL \"{text}\": {what}; expected towline://HOST[:PORT]/EXPORT/PATH or towline+unix:///EXPORT/PATH?socket=SOCKET"
            )
        };
        let (scheme, rest) = text.split_once("://").ok_or_else(|| wrong("no \"://\""))?;
        let (rest, query) = rest.split_once('?').map_or((rest, None), |(a, b)| (a, Some(b)));
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        let transport = match scheme {
            "towline" | "towline+tcp" => {
                if query.is_some() {
                    return Err(wrong("a query has no meaning over TCP (encode \"?\" as %3F)"));
                }
                let (host, port) = host_and_port(host).map_err(wrong)?;
                if scheme == "towline" {
                    Transport::Nearest(host, port)
                } else {
                    Transport::Tcp(host, port)
                }
            }
            "towline+unix" | "towline+shm" => {
                let socket =
                    query.and_then(|q| q.strip_prefix("socket=")).filter(|s| !s.is_empty());
                let socket =
                    socket.ok_or_else(|| wrong("no \"?socket=\" with the path of the socket"))?;
                if !host.is_empty() {
                    return Err(wrong("a host has no meaning with a Unix socket"));
                }
                let socket = path_of(decode(socket));
                if scheme == "towline+shm" {
                    Transport::Shm(socket)
                } else {
                    Transport::Unix(socket)
                }
            }
            _ => return Err(wrong("unknown scheme")),
        };
        let (export, path) = path.split_once('/').unwrap_or((path, ""));
        let path = path.trim_start_matches('/');
        if export.is_empty() && !path.is_empty() {
            return Err(wrong("no name of an export before the path (a doubled slash?)"));
        }
        Ok(Self { transport, export: decode(export), path: decode(path) })
    }

    /// Returns the URL of the whole export.
    #[must_use]
    pub fn of_export(&self) -> Self {
        Self { path: Vec::new(), ..self.clone() }
    }

    /// Returns the argument for [`crate::Client::attach`] that makes this directory the root:
    /// export and path.
    #[must_use]
    pub fn root(&self) -> Vec<u8> {
        let mut root = self.export.clone();
        if !self.path.is_empty() {
            root.push(b'/');
            root.extend_from_slice(&self.path);
        }
        root
    }

    /// Returns the URL of a name below this one; below a server, that of an export.
    #[must_use]
    pub fn join(&self, name: &[u8]) -> Self {
        if self.export.is_empty() {
            return Self { export: name.to_vec(), ..self.clone() };
        }
        let mut path = self.path.clone();
        if !path.is_empty() && !path.ends_with(b"/") {
            path.push(b'/');
        }
        path.extend_from_slice(name);
        Self { path, ..self.clone() }
    }
}

fn host_and_port(host: &str) -> Result<(String, u16), &'static str> {
    if let Some(rest) = host.strip_prefix('[') {
        let (address, port) = rest.split_once(']').ok_or("\"[\" without \"]\"")?;
        let port = match port.strip_prefix(':') {
            Some(port) => port.parse().map_err(|_| "bad port")?,
            None if port.is_empty() => DEFAULT_PORT,
            None => return Err("text after \"]\""),
        };
        if address.is_empty() || address.contains('[') {
            return Err("no address between \"[\" and \"]\"");
        }
        return Ok((address.to_owned(), port));
    }
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) => (name, port.parse().map_err(|_| "bad port")?),
        None => (host, DEFAULT_PORT),
    };
    if name.is_empty() {
        return Err("no host");
    }
    // Without brackets nobody knows whether the last part of an address is a port.
    if name.contains(['[', ']', ':']) {
        return Err("brackets belong around the whole of an IPv6 address");
    }
    Ok((name.to_owned(), port))
}

fn decode(text: &str) -> Vec<u8> {
    percent_decode_str(text).collect()
}

fn path_of(bytes: Vec<u8>) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    PathBuf::from(std::ffi::OsString::from_vec(bytes))
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use std::os::unix::ffi::OsStrExt;
        let (scheme, socket) = match &self.transport {
            Transport::Nearest(host, port) => return self.fmt_host(f, "towline", host, *port),
            Transport::Tcp(host, port) => return self.fmt_host(f, "towline+tcp", host, *port),
            Transport::Unix(socket) => ("towline+unix", socket),
            Transport::Shm(socket) => ("towline+shm", socket),
        };
        write!(f, "{scheme}://")?;
        self.fmt_place(f)?;
        write!(f, "?socket={}", percent_encode(socket.as_os_str().as_bytes(), ENCODED))
    }
}

impl Url {
    fn fmt_host(
        &self,
        f: &mut fmt::Formatter<'_>,
        scheme: &str,
        host: &str,
        port: u16,
    ) -> fmt::Result {
        if host.contains(':') {
            write!(f, "{scheme}://[{host}]:{port}")?;
        } else {
            write!(f, "{scheme}://{host}:{port}")?;
        }
        self.fmt_place(f)
    }

    fn fmt_place(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/{}", percent_encode(&self.export, ENCODED_NAME))?;
        if self.path.is_empty() {
            return Ok(());
        }
        // Encoded, because leading slashes are not parsed as part of the path.
        let slashes = self.path.iter().take_while(|byte| **byte == b'/').count();
        write!(f, "/{}", "%2F".repeat(slashes))?;
        write!(f, "{}", percent_encode(&self.path[slashes..], ENCODED))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_survive_a_round_trip() {
        for text in [
            "towline+tcp://h:1/data",
            "towline://127.0.0.1:7440/data/some/dir",
            "towline://[::1]:1/x",
            "towline+unix:///data/a%20b%3Fc?socket=/run/t.sock",
            "towline://h/a%2Fb/%2F%2fc/d",
            "towline+shm:///data/%FF%00?socket=/run/t%23.sock",
        ] {
            let url = Url::parse(text).unwrap();
            assert_eq!(Url::parse(&url.to_string()).unwrap(), url, "{text}");
        }
        let url = Url::parse("towline://host/data/%ff").unwrap();
        assert_eq!(url.transport, Transport::Nearest("host".into(), DEFAULT_PORT));
        assert_eq!(url.path, b"\xff");
        for server in ["towline://host", "towline://host/", "towline+unix:///?socket=/s"] {
            let url = Url::parse(server).unwrap();
            assert!(url.export.is_empty() && url.path.is_empty(), "{server}");
            let (export, below) = (url.join(b"a/b"), url.join(b"data").join(b"x"));
            assert_eq!((export.export.as_slice(), export.path.as_slice()), (&b"a/b"[..], &b""[..]));
            assert_eq!((below.export.as_slice(), below.path.as_slice()), (&b"data"[..], &b"x"[..]));
            for url in [export, below] {
                assert_eq!(Url::parse(&url.to_string()).unwrap(), url, "{server}");
            }
        }
    }

    #[test]
    fn bad_urls_are_refused_with_a_reason() {
        for text in [
            "x",
            "http://h/x",
            "towline:///x",
            "towline://h:x/",
            "towline://[]/x",
            "towline://a[:1/x",
            "towline://a]:b:1/x",
            "towline://::1/x",
            "towline://fe80::1:7440/x",
            "towline+unix:///x",
            "towline+unix://h/x?socket=/s",
            "towline://h:1//data/x",
            "towline://h///x",
            "towline+shm:////data?socket=/s",
        ] {
            let error = Url::parse(text).unwrap_err();
            assert!(error.contains(text) && error.contains("expected"), "{error}");
        }
    }
}

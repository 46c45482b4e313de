//! Option haggling of the faulty server.

use std::io::{self, Read};

use nbd_conformance::wire::*;

use super::{CONTEXTS, Client, DESCRIPTION, GRAIN, MAXIMUM, Next, SIZE, Setup};

impl Client {
    pub(super) fn option(&mut self) -> io::Result<Next> {
        let header = self.recv_or(16, "option-header-one-read")?;
        let magic = u64::from_be_bytes(header[..8].try_into().unwrap());
        if magic != OPTION_MAGIC && !self.has("option-magic-ignored") {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let option = u32::from_be_bytes(header[8..12].try_into().unwrap());
        let length = u32::from_be_bytes(header[12..].try_into().unwrap()) as usize;
        if length > 64 << 10 {
            if self.has("huge-option-kills") {
                self.server.die();
            }
            return Err(io::ErrorKind::InvalidData.into());
        }
        if length > 8 << 10 && self.has("large-option-closes") {
            return Err(io::ErrorKind::InvalidData.into());
        }
        if option == OPT_UNKNOWN && self.has("unknown-data-kept") {
            self.reply(option, REP_ERR_UNSUP, b"unknown")?;
            return Ok(Next::On);
        }
        let data = self.recv(length)?;
        if option == 0 && self.has("option-zero-closes") {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let next = self.dispatch(option, &data)?;
        if self.has("pipeline-dropped") {
            let mut rest = vec![0; 4096];
            self.stream.set_nonblocking(true)?;
            // With nothing to read, this fails.
            let _ = self.stream.read(&mut rest);
            self.stream.set_nonblocking(false)?;
        }
        Ok(next)
    }

    fn dispatch(&mut self, option: u32, data: &[u8]) -> io::Result<Next> {
        match option {
            OPT_EXPORT_NAME => return self.export_name(data),
            OPT_ABORT => self.abort(option, data)?,
            OPT_LIST => self.list(option, data)?,
            OPT_STARTTLS => self.starttls(option, data)?,
            OPT_INFO | OPT_GO => return self.info(option, data),
            OPT_STRUCTURED_REPLY => self.structured(option, data)?,
            OPT_EXTENDED_HEADERS => self.extended(option, data)?,
            OPT_LIST_META_CONTEXT | OPT_SET_META_CONTEXT if self.server.setup != Setup::Plain => {
                self.contexts(option, data)?;
            }
            _ if self.has("unknown-invalid") => self.reply(option, REP_ERR_INVALID, b"")?,
            _ => self.reply(option, REP_ERR_UNSUP, b"unknown option")?,
        }
        Ok(Next::On)
    }

    fn reply(&mut self, option: u32, kind: u32, data: &[u8]) -> io::Result<()> {
        let magic = OPTION_REPLY_MAGIC + u64::from(self.has("reply-magic"));
        let option = option + u32::from(self.has("reply-other-option"));
        let data = if kind & REP_ERROR != 0 && self.has("error-text-nul") { b"\0" } else { data };
        let length = (data.len() as u32).to_be_bytes();
        let (option, kind) = (option.to_be_bytes(), kind.to_be_bytes());
        self.send(&[&magic.to_be_bytes(), &option, &kind, &length, data])
    }

    fn close(&self) -> io::Error {
        io::ErrorKind::ConnectionAborted.into()
    }

    fn knows(&self, name: &str) -> bool {
        matches!(name, "" | "disk" | "other")
    }

    fn size(&self) -> u64 {
        let odd = self.number % 2 == 1;
        if odd && self.has("size-changes") { SIZE - GRAIN as u64 } else { SIZE }
    }

    fn export_name(&mut self, data: &[u8]) -> io::Result<Next> {
        let name = String::from_utf8_lossy(data).into_owned();
        if name.len() > STRING_MAX && self.has("long-name-kills") {
            self.server.die();
        }
        if name.is_empty() && self.has("empty-name-garbage") {
            self.send(&[b"garbage"])?;
            return Err(self.close());
        }
        if !self.knows(&name) && !self.has("unknown-name-opened") {
            return Err(self.close());
        }
        let size = self.size() - if self.has("export-name-size") { 512 } else { 0 };
        let flags = self.server.flags(self.structured, self.extended);
        self.send(&[&size.to_be_bytes(), &flags.to_be_bytes()])?;
        if !self.no_zeroes || self.has("padding-always") {
            let byte = u8::from(self.has("padding-not-zero"));
            self.send(&[&[byte; EXPORT_NAME_PADDING]])?;
        }
        self.opened(&name);
        Ok(Next::Transmission)
    }

    /// Drops the contexts if they were selected for another export.
    fn opened(&mut self, name: &str) {
        if self.contexts_of != name && !self.has("contexts-any-export") {
            self.contexts.clear();
        }
    }

    fn abort(&mut self, option: u32, data: &[u8]) -> io::Result<()> {
        if !data.is_empty() && self.has("abort-data-invalid") {
            return self.reply(option, REP_ERR_INVALID, b"");
        }
        if self.has("abort-silent") {
            return Err(self.close());
        }
        let acknowledged = self.reply(option, REP_ACK, b"");
        if self.has("abort-trailing") {
            self.send(&[b"bye"])?;
        }
        let gone = acknowledged.is_err()
            || self.recv(1).is_err_and(|e| e.kind() != io::ErrorKind::UnexpectedEof);
        if gone && self.has("abort-gone-kills") {
            self.server.die();
        }
        Err(self.close())
    }

    fn list(&mut self, option: u32, data: &[u8]) -> io::Result<()> {
        if self.has("list-unsup") {
            return self.reply(option, REP_ERR_UNSUP, b"");
        }
        if !data.is_empty() && !self.has("list-data-ignored") {
            return self.reply(option, REP_ERR_INVALID, b"LIST takes no data");
        }
        if self.has("list-forgets-structured") {
            self.structured = false;
        }
        self.lists += 1;
        if !(self.lists > 1 && self.has("list-once")) {
            for name in ["disk", "other"] {
                let name = if self.has("list-ghost") { "ghost" } else { name };
                let length = name.len() as u32 + if self.has("list-long-name") { 99 } else { 0 };
                let entry =
                    [&length.to_be_bytes(), name.as_bytes(), DESCRIPTION.as_bytes()].concat();
                self.reply(option, REP_SERVER, &entry)?;
            }
        }
        self.reply(option, REP_ACK, b"")
    }

    fn starttls(&mut self, option: u32, data: &[u8]) -> io::Result<()> {
        if self.has("starttls-odd-error") {
            return self.reply(option, REP_ERR_TOO_BIG, b"");
        }
        if !data.is_empty() {
            let ack = self.has("starttls-data-ack");
            return self.reply(option, if ack { REP_ACK } else { REP_ERR_INVALID }, b"");
        }
        if self.server.setup == Setup::Tls {
            self.reply(option, REP_ACK, b"")?;
            // There is no TLS here, so every handshake fails.
            return if self.has("starttls-plain") { Ok(()) } else { Err(self.close()) };
        }
        if self.has("starttls-forgets") {
            self.structured = false;
        }
        self.reply(option, REP_ERR_POLICY, b"no TLS")
    }

    fn structured(&mut self, option: u32, data: &[u8]) -> io::Result<()> {
        if self.server.setup == Setup::Plain {
            return self.reply(option, REP_ERR_UNSUP, b"");
        }
        if !data.is_empty() && !self.has("structured-data-ack") {
            return self.reply(option, REP_ERR_INVALID, b"no data");
        }
        if self.extended && !self.has("extended-then-structured-ack") {
            return self.reply(option, REP_ERR_EXT_HEADER_REQD, b"");
        }
        if self.has("structured-info") {
            self.reply(option, REP_INFO, b"\0\0")?;
        }
        self.structured = !(self.structured && self.has("structured-toggle"));
        self.reply(option, REP_ACK, b"")
    }

    fn extended(&mut self, option: u32, data: &[u8]) -> io::Result<()> {
        if self.server.setup == Setup::Plain {
            return self.reply(option, REP_ERR_UNSUP, b"");
        }
        if !data.is_empty() && !self.has("extended-data-ack") {
            return self.reply(option, REP_ERR_INVALID, b"no data");
        }
        if self.structured && self.has("extended-or-structured") {
            return self.reply(option, REP_ERR_INVALID, b"");
        }
        if self.has("extended-info") {
            self.reply(option, REP_INFO, b"\0\0")?;
        }
        self.extended = true;
        self.reply(option, REP_ACK, b"")
    }

    fn info(&mut self, option: u32, data: &[u8]) -> io::Result<Next> {
        let Some((name, requests)) = self.parse_info(data) else {
            let short = data.len() < 6 && self.has("short-info-unknown");
            let kind = if short { REP_ERR_UNKNOWN } else { REP_ERR_INVALID };
            self.reply(option, kind, b"bad lengths")?;
            return if option == OPT_GO && self.has("go-failure-closes") {
                Err(self.close())
            } else {
                Ok(Next::On)
            };
        };
        if name.len() > 256 && self.has("long-info-closes") {
            return Err(self.close());
        }
        if !self.knows(&name) {
            if self.has("unknown-export-chatty") {
                self.send_info(option, &[&INFO_NAME.to_be_bytes(), b"disk"])?;
            }
            let kind = match () {
                () if self.has("unknown-export-policy") => REP_ERR_POLICY,
                () if self.has("tls-required") => REP_ERR_TLS_REQD,
                () => REP_ERR_UNKNOWN,
            };
            self.reply(option, kind, b"no such export")?;
            return if option == OPT_GO && self.has("go-failure-closes") {
                Err(self.close())
            } else {
                Ok(Next::On)
            };
        }
        if self.has("unknown-info-invalid") && requests.iter().any(|request| *request > 3) {
            self.reply(option, REP_ERR_INVALID, b"")?;
            return Ok(Next::On);
        }
        let asked = requests.contains(&INFO_BLOCK_SIZE);
        if !asked && self.has("block-size-required") || self.has("block-size-always-required") {
            self.reply(option, REP_ERR_BLOCK_SIZE_REQD, b"")?;
            return Ok(Next::On);
        }
        self.send_infos(option, &requests)?;
        self.reply(option, REP_ACK, b"")?;
        if option == OPT_INFO {
            return if self.has("info-then-close") { Err(self.close()) } else { Ok(Next::On) };
        }
        if self.has("go-padding") || !self.no_zeroes && self.has("go-padding-old") {
            self.send(&[&[0; EXPORT_NAME_PADDING]])?;
        }
        self.opened(&name);
        Ok(Next::Transmission)
    }

    fn send_info(&mut self, option: u32, parts: &[&[u8]]) -> io::Result<()> {
        self.reply(option, REP_INFO, &parts.concat())
    }

    fn send_infos(&mut self, option: u32, requests: &[u16]) -> io::Result<()> {
        let mut flags = self.server.flags(self.structured, self.extended);
        if option == OPT_GO && self.has("go-other-flags") {
            flags |= FLAG_ROTATIONAL;
        }
        let size = self.size().to_be_bytes();
        if !self.has("info-export-missing") || option == OPT_GO {
            self.send_info(option, &[&INFO_EXPORT.to_be_bytes(), &size, &flags.to_be_bytes()])?;
        }
        if requests.contains(&INFO_NAME) {
            let name: &[u8] = if self.has("name-not-listed") { b"alias" } else { b"disk" };
            self.send_info(option, &[&INFO_NAME.to_be_bytes(), name])?;
            if self.has("info-twice") {
                self.send_info(option, &[&INFO_NAME.to_be_bytes(), name])?;
            }
        }
        if requests.contains(&INFO_DESCRIPTION) {
            let broken = self.has("description-not-utf8");
            let text: &[u8] = if broken { b"\xff" } else { DESCRIPTION.as_bytes() };
            self.send_info(option, &[&INFO_DESCRIPTION.to_be_bytes(), text])?;
        }
        if requests.contains(&INFO_BLOCK_SIZE) && self.server.setup != Setup::Plain {
            let preferred = self.server.setup.block().max(4096) as u32;
            let preferred = if self.has("preferred-3000") { 3000 } else { preferred };
            let maximum = if self.has("maximum-small") { 64 << 10 } else { MAXIMUM as u32 };
            let sizes = [self.server.setup.block() as u32, preferred, maximum]
                .map(u32::to_be_bytes)
                .concat();
            let short = usize::from(self.has("block-size-short"));
            self.send_info(option, &[&INFO_BLOCK_SIZE.to_be_bytes(), &sizes[short..]])?;
        }
        Ok(())
    }

    fn parse_info(&self, data: &[u8]) -> Option<(String, Vec<u16>)> {
        let (length, rest) = data.split_first_chunk::<4>()?;
        let length = u32::from_be_bytes(*length) as usize;
        if length > rest.len() && self.has("name-beyond-taken") {
            return Some(("nobody".to_owned(), Vec::new()));
        }
        if length > STRING_MAX {
            return None;
        }
        let (name, rest) = rest.split_at_checked(length)?;
        let (count, rest) = rest.split_first_chunk::<2>()?;
        let count = usize::from(u16::from_be_bytes(*count));
        if rest.len() != 2 * count && !self.has("info-count-ignored") {
            return None;
        }
        let requests = rest.chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]));
        Some((String::from_utf8_lossy(name).into_owned(), requests.collect()))
    }

    fn contexts(&mut self, option: u32, data: &[u8]) -> io::Result<()> {
        let set = option == OPT_SET_META_CONTEXT;
        if set && !self.has("failure-keeps") && !self.has("set-adds") {
            self.contexts.clear();
        }
        if set && !self.structured && !self.extended && !self.has("set-without-structured") {
            return self.reply(option, REP_ERR_INVALID, b"structured replies come first");
        }
        let Some((name, queries)) = self.parse_contexts(data) else {
            let kind = if self.has("truncated-unsup") { REP_ERR_UNSUP } else { REP_ERR_INVALID };
            return self.reply(option, kind, b"bad lengths");
        };
        if !self.knows(&name) && !self.has("meta-any-export") {
            return self.reply(option, REP_ERR_UNKNOWN, b"no such export");
        }
        if self.closes_on(&queries) {
            return Err(self.close());
        }
        let unknown = queries.iter().any(|query| !query.starts_with("base:allocation"));
        if self.has(if set { "set-unknown-invalid" } else { "list-unknown-invalid" }) && unknown {
            return self.reply(option, REP_ERR_INVALID, b"");
        }
        for (place, context) in CONTEXTS.into_iter().enumerate() {
            if !self.chosen(set, context, &queries) {
                continue;
            }
            let same = self.has("same-id");
            let id = if same { 1 } else { place as u32 + 1 };
            let shown = if self.has("context-without-colon") { "allocation" } else { context };
            if !(set && self.has("set-no-reply")) {
                let id = if set { id } else { 0 };
                self.reply(
                    option,
                    REP_META_CONTEXT,
                    &[&id.to_be_bytes(), shown.as_bytes()].concat(),
                )?;
            }
            if set || self.has("list-selects") {
                self.contexts.push(id);
                self.contexts_of.clone_from(&name);
            }
        }
        self.reply(option, REP_ACK, b"")
    }

    fn closes_on(&self, queries: &[String]) -> bool {
        self.has("no-colon-closes") && queries.iter().any(|query| !query.contains(':'))
            || self.has("many-queries-closes") && queries.len() > 100
            || self.has("long-query-closes") && queries.iter().any(|query| query.len() > STRING_MAX)
    }

    fn chosen(&self, set: bool, context: &str, queries: &[String]) -> bool {
        if queries.is_empty() {
            return !set || self.has("no-query-selects-all");
        }
        let queries = if self.has("first-query-only") { &queries[..1] } else { queries };
        let (namespace, _) = context.split_once(':').unwrap();
        let matches = |query: &String| {
            let wildcard = *query == format!("{namespace}:");
            query == context
                || wildcard && !set && !self.has("wildcard-empty")
                || wildcard && set && self.has("set-wildcard") && namespace == "base"
                || wildcard && set && self.has("set-empty-leaf") && namespace != "base"
                || self.has("leaf-prefix") && query.len() > 8 && context.starts_with(query.as_str())
                || self.has("exact-finds-all") && query.starts_with("base:")
                || self.has("unknown-finds-all")
        };
        queries.iter().any(matches)
    }

    fn parse_contexts(&self, data: &[u8]) -> Option<(String, Vec<String>)> {
        let (name, rest) = string(data)?;
        let (count, mut rest) = rest.split_first_chunk::<4>()?;
        let mut queries = Vec::new();
        for _ in 0..u32::from_be_bytes(*count) {
            let (query, behind) = string(rest)?;
            queries.push(query);
            rest = behind;
        }
        (rest.is_empty() || self.has("surplus-ignored")).then_some((name, queries))
    }
}

/// Splits off a string that follows its length, and returns it with the rest.
fn string(data: &[u8]) -> Option<(String, &[u8])> {
    let (length, rest) = data.split_first_chunk::<4>()?;
    let (text, rest) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)?;
    Some((String::from_utf8_lossy(text).into_owned(), rest))
}

//! Parses and answers each option of the handshake.

use super::{Ended, Haggle, option_error, option_reply_message};
use crate::constants::{PAYLOAD_BYTES_MAX, STRING_BYTES_MAX, info, option, option_reply};
use crate::{Agreement, Catalogue, Context, Form, Offer, ProtocolError};

/// Reads big-endian numbers and strings from the front of an option's payload.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn word(&mut self) -> Option<u32> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_be_bytes(*bytes))
    }

    fn half(&mut self) -> Option<u16> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u16::from_be_bytes(*bytes))
    }

    /// Reads a string that is preceded by its length.
    fn string(&mut self) -> Option<&'a [u8]> {
        let length = self.word()? as usize;
        if length > STRING_BYTES_MAX {
            return None;
        }
        let (string, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(string)
    }
}

/// Parses an export's name and the kinds of information asked for.
fn parse_info(payload: &[u8]) -> Option<(&[u8], Vec<u16>)> {
    let mut fields = Fields(payload);
    let name = fields.string()?;
    let count = fields.half()?;
    let mut kinds = Vec::new();
    for _ in 0..count {
        kinds.push(fields.half()?);
    }
    fields.0.is_empty().then_some((name, kinds))
}

/// Parses an export's name and the queries for contexts.
fn parse_queries(payload: &[u8]) -> Option<(&[u8], Vec<&[u8]>)> {
    let mut fields = Fields(payload);
    let name = fields.string()?;
    let count = fields.word()?;
    let mut queries = Vec::new();
    for _ in 0..count {
        queries.push(fields.string()?);
    }
    fields.0.is_empty().then_some((name, queries))
}

impl Haggle {
    pub(super) fn option(
        &mut self,
        option: u32,
        payload: &[u8],
        out: &mut Vec<u8>,
        catalogue: &dyn Catalogue,
    ) -> Result<Option<Ended>, ProtocolError> {
        if catalogue.shutting_down() && !matches!(option, option::ABORT | option::EXPORT_NAME) {
            let text = "the server is shutting down";
            option_error(out, option, option_reply::ERR_SHUTDOWN, text);
            return Ok(None);
        }
        let invalid = |out: &mut Vec<u8>, text: &str| {
            option_error(out, option, option_reply::ERR_INVALID, text);
            Ok(None)
        };
        match option {
            option::EXPORT_NAME => return self.export_name(payload, out, catalogue),
            option::ABORT => {
                option_reply_message(out, option, option_reply::ACK, &[]);
                return Ok(Some(Ended::Aborted));
            }
            option::LIST | option::STRUCTURED_REPLY | option::EXTENDED_HEADERS
                if !payload.is_empty() =>
            {
                return invalid(out, "this option has no payload");
            }
            option::LIST => list(out, catalogue),
            option::STARTTLS => {
                if !payload.is_empty() {
                    return invalid(out, "this option has no payload");
                }
                let text = "this server does not encrypt";
                option_error(out, option, option_reply::ERR_POLICY, text);
            }
            option::STRUCTURED_REPLY if self.form == Form::Extended => {
                let text = "extended headers are in use already";
                option_error(out, option, option_reply::ERR_EXT_HEADER_REQD, text);
            }
            option::STRUCTURED_REPLY => {
                self.form = Form::Structured;
                option_reply_message(out, option, option_reply::ACK, &[]);
            }
            option::EXTENDED_HEADERS => {
                self.form = Form::Extended;
                option_reply_message(out, option, option_reply::ACK, &[]);
            }
            option::INFO | option::GO => {
                let Some((name, kinds)) = parse_info(payload) else {
                    return invalid(out, "malformed request for information");
                };
                return Ok(self.info(option, name, &kinds, out, catalogue));
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                if option == option::SET_META_CONTEXT {
                    self.contexts = None;
                }
                let Some((name, queries)) = parse_queries(payload) else {
                    return invalid(out, "malformed list of metadata contexts");
                };
                if self.form == Form::Simple {
                    return invalid(out, "metadata contexts need structured replies");
                }
                self.meta_contexts(option, name, &queries, out, catalogue);
            }
            _ => option_error(out, option, option_reply::ERR_UNSUP, "unknown option"),
        }
        Ok(None)
    }

    fn export_name(
        &mut self,
        name: &[u8],
        out: &mut Vec<u8>,
        catalogue: &dyn Catalogue,
    ) -> Result<Option<Ended>, ProtocolError> {
        if self.form == Form::Extended {
            return Err(ProtocolError("EXPORT_NAME after extended headers"));
        }
        if name.len() > STRING_BYTES_MAX {
            return Err(ProtocolError("export name is too long"));
        }
        if catalogue.shutting_down() {
            return Ok(Some(Ended::Refused("the server is shutting down")));
        }
        let Some(offer) = catalogue.find(name) else {
            return Ok(Some(Ended::Refused("EXPORT_NAME of no export here")));
        };
        out.extend_from_slice(&offer.size.to_be_bytes());
        out.extend_from_slice(&offer.flags(self.form).to_be_bytes());
        if !self.no_zeroes {
            out.extend_from_slice(&[0; 124]);
        }
        Ok(Some(self.agree(offer, name)))
    }

    fn agree(&mut self, export: Offer, name: &[u8]) -> Ended {
        // The chosen contexts apply only to the export they were chosen for.
        let contexts = match self.contexts.take() {
            Some((chosen_for, contexts)) if chosen_for == name => contexts,
            _ => Vec::new(),
        };
        Ended::Agreed(Box::new(Agreement { export, form: self.form, contexts }))
    }

    fn info(
        &mut self,
        option: u32,
        name: &[u8],
        kinds: &[u16],
        out: &mut Vec<u8>,
        catalogue: &dyn Catalogue,
    ) -> Option<Ended> {
        let Some(offer) = catalogue.find(name) else {
            option_error(out, option, option_reply::ERR_UNKNOWN, "no export of this name");
            return None;
        };
        let mut tell = |kind: u16, parts: &[&[u8]]| {
            let kind = kind.to_be_bytes();
            let mut payload: Vec<&[u8]> = vec![&kind];
            payload.extend_from_slice(parts);
            option_reply_message(out, option, option_reply::INFO, &payload);
        };
        let (size, flags) = (offer.size.to_be_bytes(), offer.flags(self.form).to_be_bytes());
        tell(info::EXPORT, &[&size, &flags]);
        if kinds.contains(&info::NAME) {
            tell(info::NAME, &[offer.name.as_bytes()]);
        }
        if kinds.contains(&info::DESCRIPTION) && !offer.description.is_empty() {
            tell(info::DESCRIPTION, &[cut(&offer.description).as_bytes()]);
        }
        // Sent even when not asked for, since clients that know it benefit.
        let (minimum, preferred) = (offer.block_minimum, offer.block_preferred);
        let sizes = [minimum, preferred, PAYLOAD_BYTES_MAX].map(u32::to_be_bytes);
        tell(info::BLOCK_SIZE, &[sizes.as_flattened()]);
        option_reply_message(out, option, option_reply::ACK, &[]);
        if option == option::INFO {
            return None;
        }
        Some(self.agree(offer, name))
    }

    fn meta_contexts(
        &mut self,
        option: u32,
        name: &[u8],
        queries: &[&[u8]],
        out: &mut Vec<u8>,
        catalogue: &dyn Catalogue,
    ) {
        let Some(offer) = catalogue.find(name) else {
            option_error(out, option, option_reply::ERR_UNKNOWN, "no export of this name");
            return;
        };
        let listing = option == option::LIST_META_CONTEXT;
        let matches = |context: &str, query: &[u8]| {
            if context.as_bytes() == query {
                return true;
            }
            // When listing, a namespace, or a namespace and the first part of a leaf, matches everything in
            // it.
            listing
                && query.contains(&b':')
                && query.ends_with(b":")
                && context.as_bytes().starts_with(query)
        };
        let mut chosen = Vec::new();
        for (number, context) in offer.contexts.iter().enumerate() {
            let all = listing && queries.is_empty();
            if all || queries.iter().any(|query| matches(context, query)) {
                let found = Context { number };
                let id = if listing { 0u32 } else { found.id() }.to_be_bytes();
                let parts = [&id[..], context.as_bytes()];
                option_reply_message(out, option, option_reply::META_CONTEXT, &parts);
                chosen.push(found);
            }
        }
        option_reply_message(out, option, option_reply::ACK, &[]);
        if !listing {
            self.contexts = Some((name.to_vec(), chosen));
        }
    }
}

/// Returns as much of a text as the protocol allows: clients hang up on a longer one.
fn cut(text: &str) -> &str {
    let mut end = text.len().min(STRING_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

fn list(out: &mut Vec<u8>, catalogue: &dyn Catalogue) {
    for (name, description) in catalogue.list() {
        let length = (name.len() as u32).to_be_bytes();
        let parts = [&length[..], name.as_bytes(), cut(&description).as_bytes()];
        option_reply_message(out, option::LIST, option_reply::SERVER, &parts);
    }
    option_reply_message(out, option::LIST, option_reply::ACK, &[]);
}

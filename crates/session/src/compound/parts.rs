//! The write of several parts of a file in one operation.

use super::writing::WAITS;
use super::{Compound, Context, Step, Value, waiting_store};
use towline_store::OpenFile;
use towline_wire::Errno;
use towline_wire::items::Items;
use towline_wire::parts::Part;

impl Compound {
    /// Writes the parts of `list`, whose bytes came with the request one after another.
    pub(super) fn begin_parts(
        &mut self,
        context: &Context<'_>,
        handle: u64,
        list: &[u8],
    ) -> Result<Option<Step>, Errno> {
        let opened = self.writable_at(context, handle)?;
        let store = waiting_store(&opened).filter(|_| opened.flags & WAITS != 0);
        let (list, data) = (list.to_vec(), std::mem::take(&mut self.payload));
        Ok(self.blocking(store, move || {
            write_parts(&*opened.file, &list, &data)?;
            Ok(Value::Wrote(data.len(), 0))
        }))
    }
}

/// Writes the parts in their order, as far as they lie within the file.
fn write_parts(file: &dyn OpenFile, list: &[u8], data: &[u8]) -> Result<(), Errno> {
    let size = file.stat()?.size;
    let mut rest = data;
    for part in Items::<Part>::new(list) {
        let part = part.map_err(|_| Errno::EINVAL)?;
        let (bytes, behind) = rest.split_at_checked(part.length as usize).ok_or(Errno::EINVAL)?;
        rest = behind;
        let within = size.saturating_sub(part.offset).min(part.length.into()) as usize;
        let (written, _) = file.write(part.offset, &bytes[..within], false)?;
        if written < within {
            return Err(Errno::ENOSPC);
        }
    }
    Ok(())
}

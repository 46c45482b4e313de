//! Locale names under which libc looks for message catalogues.

/// Returns the names tried for a locale: `de_AT.UTF-8@euro` also with any part left out, and with `utf8`.
pub(crate) fn names(name: &[u8]) -> Vec<Vec<u8>> {
    if name.is_empty() || name.contains(&b'/') {
        return Vec::new();
    }
    let cut = |from: &[u8], at: u8| -> (Vec<u8>, Vec<u8>) {
        let place = from.iter().position(|b| *b == at).unwrap_or(from.len());
        (from[..place].to_vec(), from[place..].to_vec())
    };
    let (rest, modifier) = cut(name, b'@');
    let (rest, codeset) = cut(&rest, b'.');
    let (language, territory) = cut(&rest, b'_');
    let letters = codeset.iter().filter(|b| b.is_ascii_alphanumeric());
    let plain = [vec![b'.'], letters.map(u8::to_ascii_lowercase).collect()].concat();
    let mut all = Vec::new();
    for modifier in [&modifier[..], b""] {
        for territory in [&territory[..], b""] {
            for codeset in [&codeset[..], &plain, b""] {
                all.push([&language[..], territory, codeset, modifier].concat());
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_locale_has_many_names() {
        let names = super::names(b"de_AT.UTF-8@euro");
        for wanted in ["de_AT.UTF-8@euro", "de_AT.utf8", "de_AT", "de@euro", "de"] {
            assert!(names.contains(&wanted.as_bytes().to_vec()), "{wanted}");
        }
        assert!(super::names(b"de").contains(&b"de".to_vec()));
        assert!(super::names(b"../x").is_empty() && super::names(b"").is_empty());
    }
}

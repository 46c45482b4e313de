//! Points in time as text, in the zone of `/etc/localtime` (or `TZ=UTC`).

use towline_client::Timestamp;

/// Seconds of half a year: beyond it `ls -l` shows the year instead of the time of day.
const RECENT_SECONDS: i64 = 15_778_476;
const MONTHS: [&str; 12] =
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/// Offsets from UTC over time.
#[derive(Debug, Default)]
pub(crate) struct Zone {
    /// From this second on, this offset in seconds; ascending.
    changes: Vec<(i64, i32)>,
    /// Before the first change.
    first: i32,
}

impl Zone {
    /// The zone of this machine; UTC where it cannot be read.
    pub(crate) fn local() -> Self {
        let path = match std::env::var("TZ") {
            Err(_) => "/etc/localtime".to_owned(),
            Ok(name) if name.starts_with(':') || name.starts_with('/') => {
                name.trim_start_matches(':').to_owned()
            }
            Ok(name) => format!("/usr/share/zoneinfo/{name}"),
        };
        std::fs::read(path).ok().and_then(|bytes| parse(&bytes)).unwrap_or_default()
    }

    fn offset(&self, seconds: i64) -> i32 {
        let after = self.changes.partition_point(|(from, _)| *from <= seconds);
        if after == 0 { self.first } else { self.changes[after - 1].1 }
    }

    /// Like `Mar  7 14:05`, or `Mar  7  2019` for what is not recent: always 12 characters for
    /// years of four digits.
    pub(crate) fn brief(&self, time: Timestamp, now: i64) -> String {
        let (year, month, day, hour, minute, _) = self.civil(time.seconds);
        let month = MONTHS[month as usize - 1];
        let age = now.saturating_sub(time.seconds);
        if (0..RECENT_SECONDS).contains(&age) {
            format!("{month} {day:>2} {hour:02}:{minute:02}")
        } else {
            format!("{month} {day:>2} {year:>5}")
        }
    }

    /// Like `2026-03-07 14:05:01.123456789 +0100`.
    pub(crate) fn full(&self, time: Timestamp) -> String {
        let (year, month, day, hour, minute, second) = self.civil(time.seconds);
        let offset = self.offset(time.seconds);
        let (sign, minutes) = (if offset < 0 { '-' } else { '+' }, offset.unsigned_abs() / 60);
        format!(
            "{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{:09} \
             {sign}{:02}{:02}",
            time.nanoseconds,
            minutes / 60,
            minutes % 60
        )
    }

    fn civil(&self, seconds: i64) -> (i64, u32, u32, i64, i64, i64) {
        let local = seconds.saturating_add(self.offset(seconds).into());
        let (year, month, day) = date(local.div_euclid(86_400));
        let rest = local.rem_euclid(86_400);
        (year, month, day, rest / 3600, rest / 60 % 60, rest % 60)
    }
}

/// Seconds since 1970, now.
pub(crate) fn now() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |d| i64::try_from(d.as_secs()).unwrap_or(i64::MAX))
}

/// Year, month and day of a day counted from 1970-01-01, in the Gregorian calendar.
fn date(days: i64) -> (i64, u32, u32) {
    // Years are counted from March here, so that the leap day is the last of its year.
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month as u32, day as u32)
}

/// Reads a zone file (RFC 8536), its part with 64-bit times if it has one.
fn parse(bytes: &[u8]) -> Option<Zone> {
    let counts = header(bytes)?;
    if bytes.get(4)? >= &b'2' {
        let second = bytes.get(44 + counts.data_bytes(4)..)?;
        return changes(second, header(second)?, 8);
    }
    changes(bytes, counts, 4)
}

struct Counts {
    utc_flags: usize,
    standard_flags: usize,
    leaps: usize,
    times: usize,
    types: usize,
    letters: usize,
}

impl Counts {
    fn data_bytes(&self, time_bytes: usize) -> usize {
        self.times * (time_bytes + 1)
            + self.types * 6
            + self.letters
            + self.leaps * (time_bytes + 4)
            + self.standard_flags
            + self.utc_flags
    }
}

fn header(bytes: &[u8]) -> Option<Counts> {
    if !bytes.starts_with(b"TZif") {
        return None;
    }
    let number = |index: usize| {
        let at = 20 + 4 * index;
        Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?) as usize)
    };
    Some(Counts {
        utc_flags: number(0)?,
        standard_flags: number(1)?,
        leaps: number(2)?,
        times: number(3)?,
        types: number(4)?,
        letters: number(5)?,
    })
}

fn changes(bytes: &[u8], counts: Counts, time_bytes: usize) -> Option<Zone> {
    let data = bytes.get(44..)?;
    let types = data.get(counts.times * (time_bytes + 1)..)?;
    let offset = |kind: usize| {
        if kind >= counts.types {
            return None;
        }
        Some(i32::from_be_bytes(types.get(kind * 6..kind * 6 + 4)?.try_into().ok()?))
    };
    let mut zone = Zone { changes: Vec::new(), first: offset(0)? };
    for index in 0..counts.times {
        let at = data.get(index * time_bytes..(index + 1) * time_bytes)?;
        let from = match time_bytes {
            4 => i32::from_be_bytes(at.try_into().ok()?).into(),
            _ => i64::from_be_bytes(at.try_into().ok()?),
        };
        let kind = *data.get(counts.times * time_bytes + index)?;
        zone.changes.push((from, offset(kind.into())?));
    }
    Some(zone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_gregorian() {
        assert_eq!(date(0), (1970, 1, 1));
        assert_eq!(date(-1), (1969, 12, 31));
        assert_eq!(date(19_782), (2024, 2, 29));
        assert_eq!(date(11_016), (2000, 2, 29));
        assert_eq!(date(47_540), (2100, 2, 28));
        assert_eq!(date(47_541), (2100, 3, 1));
    }

    #[test]
    fn times_are_shown_in_the_zone() {
        let zone = Zone { changes: vec![(100, 3600)], first: -1800 };
        assert_eq!(zone.full(Timestamp::new(0, 5)), "1969-12-31 23:30:00.000000005 -0030");
        assert_eq!(zone.full(Timestamp::new(100, 0)), "1970-01-01 01:01:40.000000000 +0100");
        assert_eq!(zone.brief(Timestamp::new(100, 0), 200), "Jan  1 01:01");
        assert_eq!(zone.brief(Timestamp::new(100, 0), i64::MAX), "Jan  1  1970");
    }

    #[test]
    fn broken_zone_files_are_not_believed() {
        assert!(parse(b"TZif2").is_none());
        assert!(parse(b"not a zone").is_none());
        let mut file = b"TZif\0".to_vec();
        file.resize(44, 0);
        file[35] = 1; // one change
        file[39] = 1; // one type
        file.extend_from_slice(&7_i32.to_be_bytes());
        file.push(0);
        file.extend_from_slice(&60_i32.to_be_bytes());
        assert_eq!(parse(&file).unwrap().changes, [(7, 60)]);
        file[48] = 9;
        assert!(parse(&file).is_none(), "type out of range");
    }
}

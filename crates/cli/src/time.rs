//! Formats points in time in the time zone of this machine (`TZ`, or `/etc/localtime`).

use jiff::tz::TimeZone;
use towline_client::Timestamp;

/// Half a year in seconds: for older times `ls -l` shows the year instead of the time of day.
const RECENT_SECONDS: i64 = 15_778_476;

/// The time zone in which times are shown.
#[derive(Debug)]
pub(crate) struct Zone(TimeZone);

impl Zone {
    /// The time zone of this machine, or UTC if it cannot be determined.
    pub(crate) fn local() -> Self {
        Self(TimeZone::system())
    }

    /// Formats like `Mar  7 14:05`, or `Mar  7  2019` for times that are not recent: always 12 characters for
    /// years with four digits.
    pub(crate) fn brief(&self, time: Timestamp, now: i64) -> String {
        let age = now.saturating_sub(time.seconds);
        let recent = (0..RECENT_SECONDS).contains(&age);
        self.shown(time, if recent { "%b %e %H:%M" } else { "%b %e  %Y" })
    }

    /// Formats like `2026-03-07 14:05:01.123456789 +0100`.
    pub(crate) fn full(&self, time: Timestamp) -> String {
        self.shown(time, "%Y-%m-%d %H:%M:%S.%9N %z")
    }

    /// Formats the time. Years with more than four digits have no date: seconds since 1970 are shown instead,
    /// as in `ls`.
    fn shown(&self, time: Timestamp, format: &str) -> String {
        let nanoseconds = i32::try_from(time.nanoseconds).unwrap_or(0);
        match jiff::Timestamp::new(time.seconds, nanoseconds) {
            Ok(instant) => instant.to_zoned(self.0.clone()).strftime(format).to_string(),
            Err(_) => format!("{:>12}", time.seconds),
        }
    }
}

/// The current time in seconds since 1970.
pub(crate) fn now() -> i64 {
    jiff::Timestamp::now().as_second()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_in_the_zone() {
        let zone = Zone(TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").unwrap());
        let winter = Timestamp::new(0, 5);
        assert_eq!(zone.full(winter), "1970-01-01 01:00:00.000000005 +0100");
        let summer = Timestamp::new(1_783_000_000, 0);
        assert_eq!(zone.full(summer), "2026-07-02 15:46:40.000000000 +0200");
        assert_eq!(zone.brief(summer, summer.seconds + 5), "Jul  2 15:46");
        assert_eq!(zone.brief(summer, i64::MAX), "Jul  2  2026");
        assert_eq!(zone.brief(summer, 0), "Jul  2  2026", "the future is not recent");
    }

    #[test]
    fn times_without_a_date_are_numbers() {
        let zone = Zone(TimeZone::UTC);
        assert_eq!(zone.brief(Timestamp::new(i64::MAX, 0), 0), "9223372036854775807");
        assert_eq!(zone.full(Timestamp::new(i64::MIN, 0)), "-9223372036854775808");
        assert_eq!(zone.brief(Timestamp::new(-1, u32::MAX), i64::MAX), "Dec 31  1969");
    }
}

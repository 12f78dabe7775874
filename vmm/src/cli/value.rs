//! Values of options: sizes, durations, binds, users.
use std::path::PathBuf;
use std::time::Duration;

use sentry::signal::Signal;

/// Bytes: a number with an optional K, M, G or T (powers of 1,024; `KiB`, `MB` and so on are read alike).
pub fn size(text: &str) -> Result<u64, String> {
    let (number, unit) = split_number(text)?;
    let shift = match unit.trim_end_matches("iB").trim_end_matches(['b', 'B']).to_ascii_uppercase().as_str() {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err(format!("unknown unit '{unit}' (use K, M, G or T)")),
    };
    number.checked_mul(1 << shift).filter(|&n| n > 0).ok_or_else(|| "out of range".to_owned())
}

/// A duration: a number with ms, s, m or h; seconds without a unit.
pub fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split_number(text)?;
    let millis = match unit {
        "ms" => 1,
        "" | "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(format!("unknown unit '{unit}' (use ms, s, m or h)")),
    };
    let millis = number.checked_mul(millis).filter(|&n| n > 0).ok_or_else(|| "out of range".to_owned())?;
    Ok(Duration::from_millis(millis))
}

fn split_number(text: &str) -> Result<(u64, &str), String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number = number.parse().map_err(|_| "not a number".to_owned())?;
    Ok((number, unit))
}

/// `--bind SRC:DST[:ro]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bind {
    /// Path on the host.
    pub source: PathBuf,
    /// Absolute path in the sandbox.
    pub target: PathBuf,
    /// Whether the sandbox may not change it.
    pub read_only: bool,
}

/// Parses `SRC:DST[:ro|:rw]`.
pub fn bind(text: &str) -> Result<Bind, String> {
    let parts: Vec<&str> = text.split(':').collect();
    let (source, target, read_only) = match parts.as_slice() {
        [source, target] | [source, target, "rw"] => (source, target, false),
        [source, target, "ro"] => (source, target, true),
        _ => return Err("expected SRC:DST or SRC:DST:ro".to_owned()),
    };
    if source.is_empty() || !target.starts_with('/') {
        return Err("expected SRC:DST with an absolute DST".to_owned());
    }
    if hides_the_root(target) {
        return Err("a mount at / would hide the root file system; --rootfs replaces it".to_owned());
    }
    Ok(Bind { source: source.into(), target: target.into(), read_only })
}

/// A user or group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Id {
    /// By number.
    Number(u32),
    /// By its name in the sandbox's root.
    Name(String),
}

/// `--user USER[:GROUP]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// The user.
    pub user: Id,
    /// The group, if one is given.
    pub group: Option<Id>,
}

/// Parses `USER[:GROUP]`, each a number or a name.
pub fn user(text: &str) -> Result<User, String> {
    let id = |part: &str| match part.parse::<u32>() {
        Ok(n) if n != u32::MAX => Ok(Id::Number(n)),
        _ if part.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') => Ok(Id::Name(part.to_owned())),
        _ => Err(format!("'{part}' is neither a number nor a name")),
    };
    let (user, group) = text.split_once(':').map_or((text, None), |(user, group)| (user, Some(group)));
    Ok(User { user: id(user)?, group: group.map(id).transpose()? })
}

/// A number of CPUs.
pub fn cpus(text: &str) -> Result<u16, String> {
    text.parse().ok().filter(|n| (1..=255).contains(n)).ok_or_else(|| "use a whole number from 1 to 255".to_owned())
}

/// `--memory`: a size that a program fits in.
pub fn memory(text: &str) -> Result<u64, String> {
    size(text).and_then(|n| if n >= 1 << 20 { Ok(n) } else { Err("the least is 1M".to_owned()) })
}

/// `--env K=V`, or `K` for the caller's value.
pub fn env(text: &str) -> Result<(String, Option<String>), String> {
    match text.split_once('=') {
        Some(("", _)) => Err("the name is empty".to_owned()),
        Some((name, value)) => Ok((name.to_owned(), Some(value.to_owned()))),
        None if text.is_empty() => Err("the name is empty".to_owned()),
        None => Ok((text.to_owned(), None)),
    }
}

/// An absolute path in the sandbox.
pub fn absolute(text: &str) -> Result<PathBuf, String> {
    if text.starts_with('/') { Ok(text.into()) } else { Err("the path must be absolute".to_owned()) }
}

/// The place of a mount: absolute, and not the root itself.
pub fn mount_point(text: &str) -> Result<PathBuf, String> {
    if hides_the_root(text) {
        return Err("a mount at / would hide the root file system; --rootfs replaces it".to_owned());
    }
    absolute(text)
}

fn hides_the_root(target: &str) -> bool {
    target.starts_with('/') && target.split('/').all(|part| matches!(part, "" | "."))
}

/// A host name: 1 to 64 bytes without NUL.
pub fn hostname(text: &str) -> Result<String, String> {
    if (1..=64).contains(&text.len()) { Ok(text.to_owned()) } else { Err("a host name has 1 to 64 bytes".to_owned()) }
}

/// A sandbox's name.
pub fn name(text: &str) -> Result<String, String> {
    if crate::control::name_is_good(text) {
        return Ok(text.to_owned());
    }
    Err("a name has 1 to 64 letters, digits, '_', '.' and '-', and begins with a letter or digit".to_owned())
}

/// A signal by number or by name, with or without SIG, real-time ones as RTMIN+N and RTMAX-N.
pub fn signal(text: &str) -> Result<i32, String> {
    let unknown = || format!("there is no signal '{text}'");
    if text.starts_with(|c: char| c.is_ascii_digit()) {
        return text.parse().ok().filter(|&n| Signal::new(n).is_some()).ok_or_else(unknown);
    }
    let upper = text.to_ascii_uppercase();
    let bare = upper.strip_prefix("SIG").unwrap_or(&upper);
    // The C library keeps the first two for itself.
    let (least, most) = (i32::from(Signal::RT_MIN) + 2, i32::from(Signal::MAX));
    let step = |rest: &str, sign: char| match rest.strip_prefix(sign) {
        Some(n) => n.parse::<u8>().ok().map(i32::from),
        None => rest.is_empty().then_some(0),
    };
    let realtime = if let Some(rest) = bare.strip_prefix("RTMIN") {
        step(rest, '+').map(|n| least + n)
    } else if let Some(rest) = bare.strip_prefix("RTMAX") {
        step(rest, '-').map(|n| most - n)
    } else {
        let named = |n: &i32| Signal::new(*n).is_some_and(|s| s.name().strip_prefix("SIG") == Some(bare));
        return (1..i32::from(Signal::RT_MIN)).find(named).ok_or_else(unknown);
    };
    realtime.filter(|n| (least..=most).contains(n)).ok_or_else(unknown)
}

/// A log level by name.
pub fn level(text: &str) -> Result<log::LevelFilter, String> {
    text.parse().map_err(|_| "use off, error, warn, info, debug or trace".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(size("4096"), Ok(4096));
        assert_eq!(size("2G"), Ok(2 << 30));
        assert_eq!(size("3MiB"), Ok(3 << 20));
        assert_eq!(size("1kB"), Ok(1024));
        for bad in ["", "G", "-1", "1X", "0", "99999999T"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn durations() {
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(duration("3"), Ok(Duration::from_secs(3)));
        assert_eq!(duration("2h"), Ok(Duration::from_secs(7200)));
        assert!(duration("0").is_err() && duration("1d").is_err());
    }

    #[test]
    fn binds() {
        assert_eq!(bind("/a:/b:ro"), Ok(Bind { source: "/a".into(), target: "/b".into(), read_only: true }));
        assert!(!bind("a:/b").unwrap().read_only);
        assert!(bind("/a").is_err() && bind("/a:b").is_err() && bind("/a:/b:xx").is_err());
    }

    #[test]
    fn signals() {
        for (text, number) in
            [("9", 9), ("TERM", 15), ("sigkill", 9), ("SIGRTMIN", 34), ("RTMIN+1", 35), ("RTMAX-0", 64), ("IO", 29)]
        {
            assert_eq!(signal(text), Ok(number), "{text}");
        }
        for bad in ["", "0", "65", "FOO", "RT", "SIG", "RTMIN+31", "RTMIN-1", "9x", "-9", "RTMAX+1"] {
            assert!(signal(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn users() {
        assert_eq!(user("7"), Ok(User { user: Id::Number(7), group: None }));
        assert_eq!(user("ann:8"), Ok(User { user: Id::Name("ann".to_owned()), group: Some(Id::Number(8)) }));
        for bad in ["", ":", "7:", ":7", "4294967295", "-1", "7x", "a:b:c:"] {
            assert_eq!(user(bad).is_err(), bad != "a:b:c:", "{bad}");
        }
    }
}

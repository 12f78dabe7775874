//! Users and groups by name, as /etc/passwd and /etc/group of the sandbox's root have them (passwd(5), group(5)). Owns the look-up; never
//! what an identity may do.
use std::fs::File;
use std::io::Read;
use std::path::Path;

use rustix::fs::{Mode, OFlags, ResolveFlags, open, openat2};

use super::Failure;
use super::value::{Id, User};
use crate::sandbox::Identity;

/// Bytes of an account file that are looked at.
const MAX_FILE: u64 = 4 << 20;

/// The identity that `--user` names, and the home directory of a user given by name.
pub fn resolve(user: &User, root: &Path) -> Result<(Identity, Option<String>), Failure> {
    let (uid, mut gid, mut groups, mut home) = match &user.user {
        Id::Number(uid) => (*uid, *uid, Vec::new(), None),
        Id::Name(name) => {
            let passwd = read(root, "etc/passwd");
            let account = account(&passwd, name).ok_or_else(|| unknown("user", name, root))?;
            (account.uid, account.gid, memberships(&read(root, "etc/group"), name), Some(account.home))
        }
    };
    if let Some(group) = &user.group {
        gid = match group {
            Id::Number(gid) => *gid,
            Id::Name(name) => group_id(&read(root, "etc/group"), name).ok_or_else(|| unknown("group", name, root))?,
        };
    }
    groups.retain(|g| *g != gid);
    home = home.filter(|h| h.starts_with('/'));
    Ok((Identity { uid, gid, groups }, home))
}

fn unknown(what: &str, name: &str, root: &Path) -> Failure {
    Failure::internal(format!("there is no {what} '{name}' in the root file system '{}'", root.display()))
}

/// The file's text; empty if it cannot be read. Links in the root lead nowhere outside of it.
fn read(root: &Path, path: &str) -> String {
    let inside = || -> std::io::Result<String> {
        let dir = open(root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let fd = openat2(&dir, path, flags, Mode::empty(), ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS)?;
        let mut bytes = Vec::new();
        File::from(fd).take(MAX_FILE).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    inside().unwrap_or_default()
}

struct Account {
    uid: u32,
    gid: u32,
    home: String,
}

fn account(passwd: &str, name: &str) -> Option<Account> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let found = fields.next()? == name;
        let (uid, gid) = (fields.nth(1)?.parse().ok()?, fields.next()?.parse().ok()?);
        found.then(|| Account { uid, gid, home: fields.nth(1).unwrap_or_default().to_owned() })
    })
}

/// (name, number, members) of each line.
fn group_lines(text: &str) -> impl Iterator<Item = (&str, u32, &str)> {
    text.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        Some((name, fields.nth(1)?.parse().ok()?, fields.next().unwrap_or_default()))
    })
}

fn group_id(text: &str, name: &str) -> Option<u32> {
    group_lines(text).find(|(n, ..)| *n == name).map(|(_, gid, _)| gid)
}

fn memberships(text: &str, user: &str) -> Vec<u32> {
    group_lines(text).filter(|(.., members)| members.split(',').any(|m| m == user)).map(|(_, gid, _)| gid).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn account_files() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nbad\nodd:x:a:b::/:\nann:x:7:8::/home/ann:/bin/sh\n";
        let ann = account(passwd, "ann").unwrap();
        assert_eq!((ann.uid, ann.gid, ann.home.as_str()), (7, 8, "/home/ann"));
        assert!(account(passwd, "bad").is_none() && account(passwd, "odd").is_none() && account(passwd, "").is_none());
        let group = "root:x:0:\nbad\nwheel:x:10:bob,ann\nann:x:8:\nx:x:11:annie\n";
        assert_eq!(group_id(group, "wheel"), Some(10));
        assert_eq!(group_id(group, "nil"), None);
        assert_eq!(memberships(group, "ann"), [10]);
    }
}

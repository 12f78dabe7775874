//! The runtime directory: one directory for each named sandbox, locked while the sandbox lives and holding its socket. Owns
//! names, modes and the cleaning of what dead sandboxes left; never what goes over a socket.
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, flock, fstat, mkdirat, open, openat, stat, unlinkat};
use rustix::io::Errno;

use super::client::ControlError;

/// The socket's name in the sandbox's directory.
const SOCKET: &str = "control";
/// Longest path that `sockaddr_un` holds, without the NUL.
const LONGEST: usize = 107;
/// How often a lock that somebody holds for a moment is tried.
const TRIES: usize = 5;

/// Whether `name` may name a sandbox: 1 to 64 letters, digits, `_`, `.` and `-`, the first a letter or digit.
pub fn name_is_good(name: &str) -> bool {
    (1..=64).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
}

/// The runtime directory, open.
pub struct Runtime {
    path: PathBuf,
    dir: OwnedFd,
}

/// A name that is taken by this process; given back on drop.
pub struct Claim {
    name: String,
    path: PathBuf,
    runtime: OwnedFd,
    /// Holds the lock.
    dir: OwnedFd,
}

fn refused(doing: &str, path: &Path, error: impl fmt::Display) -> ControlError {
    ControlError(format!("the runtime directory '{}' cannot be {doing}: {error}", path.display()))
}

fn plain(error: Errno) -> io::Error {
    error.into()
}

/// Where it lies: `$XDG_RUNTIME_DIR/bartizan`; without that `/run/bartizan` for root and `/tmp/bartizan-UID` for others.
fn place() -> PathBuf {
    let uid = rustix::process::geteuid();
    match std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|p| p.is_absolute()) {
        Some(dir) => dir.join("bartizan"),
        None if uid.is_root() => PathBuf::from("/run/bartizan"),
        None => PathBuf::from(format!("/tmp/bartizan-{}", uid.as_raw())),
    }
}

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

impl Runtime {
    /// Opens it; None if there is none yet. An error if it is not this user's alone.
    pub fn open() -> Result<Option<Runtime>, ControlError> {
        Self::open_at(place())
    }

    fn open_at(path: PathBuf) -> Result<Option<Runtime>, ControlError> {
        let dir = match open(&path, DIRECTORY, Mode::empty()) {
            Ok(dir) => dir,
            Err(Errno::NOENT) => return Ok(None),
            Err(e) => return Err(refused("opened", &path, plain(e))),
        };
        let stat = fstat(&dir).map_err(|e| refused("opened", &path, plain(e)))?;
        if stat.st_uid != rustix::process::geteuid().as_raw() || stat.st_mode & 0o077 != 0 {
            return Err(refused("used", &path, "it must belong to this user and be closed to others (mode 0700)"));
        }
        Ok(Some(Runtime { path, dir }))
    }

    /// Opens it, making it if need be.
    pub fn make() -> Result<Runtime, ControlError> {
        let path = place();
        match rustix::fs::mkdir(&path, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(refused("made", &path, plain(e))),
        }
        Self::open_at(path.clone())?.ok_or_else(|| refused("opened", &path, plain(Errno::NOENT)))
    }

    /// Names that have a directory, sorted; whether their sandboxes live only a connection tells.
    pub fn names(&self) -> Result<Vec<String>, ControlError> {
        let entries = std::fs::read_dir(&self.path).map_err(|e| refused("read", &self.path, e))?;
        let mut names: Vec<String> =
            entries.flatten().filter_map(|e| e.file_name().into_string().ok()).filter(|n| name_is_good(n)).collect();
        names.sort();
        Ok(names)
    }

    /// The path of a sandbox's socket.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.path.join(name).join(SOCKET)
    }

    fn lock(&self, name: &str) -> rustix::io::Result<OwnedFd> {
        let dir = openat(&self.dir, name, DIRECTORY, Mode::empty())?;
        flock(&dir, FlockOperation::NonBlockingLockExclusive)?;
        // Whoever cleans up may have removed the directory between the two calls.
        let (held, named) = (fstat(&dir)?, stat(self.path.join(name))?);
        if (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino) { Ok(dir) } else { Err(Errno::NOENT) }
    }

    /// Takes a name for this process and listens on its socket.
    pub fn claim(self, name: &str) -> Result<(Claim, UnixListener), ControlError> {
        let path = self.path.join(name);
        let socket = self.socket(name);
        if socket.as_os_str().len() > LONGEST {
            return Err(ControlError(format!("the path of the control socket '{}' is too long", socket.display())));
        }
        let failed =
            |e: io::Error| ControlError(format!("the control socket '{}' cannot be made: {e}", socket.display()));
        for attempt in 1.. {
            match mkdirat(&self.dir, name, Mode::RWXU) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(e) => return Err(failed(plain(e))),
            }
            let dir = match self.lock(name) {
                Ok(dir) => dir,
                Err(Errno::WOULDBLOCK | Errno::NOENT) if attempt < TRIES => {
                    // Somebody may only be looking whether it is stale.
                    std::thread::sleep(std::time::Duration::from_millis(20));
                    continue;
                }
                Err(Errno::WOULDBLOCK | Errno::NOENT) => {
                    return Err(ControlError(format!("a sandbox named '{name}' is running already")));
                }
                Err(e) => return Err(failed(plain(e))),
            };
            match unlinkat(&dir, SOCKET, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(e) => return Err(failed(plain(e))),
            }
            let claim = Claim { name: name.to_owned(), path, runtime: self.dir, dir };
            let listener = UnixListener::bind(&socket).map_err(failed)?;
            listener.set_nonblocking(true).map_err(failed)?;
            return Ok((claim, listener));
        }
        unreachable!("the loop returns at its last attempt")
    }

    /// Removes what a dead sandbox left; false if the name's sandbox lives or is about to.
    pub fn clean(&self, name: &str) -> bool {
        let Ok(dir) = self.lock(name) else { return false };
        remove(&self.dir, &dir, name);
        true
    }
}

fn remove(runtime: &OwnedFd, dir: &OwnedFd, name: &str) {
    let gone = unlinkat(dir, SOCKET, AtFlags::empty());
    if let Err(e) = unlinkat(runtime, name, AtFlags::REMOVEDIR) {
        log::debug!("the directory of '{name}' stays behind: {e} (socket: {gone:?})");
    }
}

impl Claim {
    /// The sandbox's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its directory, which holds nothing but the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory that holds all of them.
    pub fn parent(&self) -> &Path {
        self.path.parent().unwrap_or(&self.path)
    }

    /// The descriptor that holds the lock.
    pub fn lock(&self) -> impl AsFd + '_ {
        self.dir.as_fd()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        remove(&self.runtime, &self.dir, &self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for good in ["a", "web-1", "A_b.c", "9", &"x".repeat(64)] {
            assert!(name_is_good(good), "{good}");
        }
        for bad in ["", ".", "..", "-a", ".a", "a/b", "a b", "ä", "a\n", &"x".repeat(65)] {
            assert!(!name_is_good(bad), "{bad}");
        }
    }

    fn runtime(name: &str) -> (PathBuf, impl Fn() -> Runtime) {
        let path = std::env::temp_dir().join(format!("bartizan-runtime-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        rustix::fs::mkdir(&path, Mode::RWXU).unwrap();
        let at = path.clone();
        (path, move || Runtime::open_at(at.clone()).unwrap().unwrap())
    }

    #[test]
    fn one_sandbox_a_name() {
        let (path, open) = runtime("claim");
        let (claim, listener) = open().claim("one").unwrap_or_else(|e| panic!("{e}"));
        assert!(!open().clean("one"), "it lives");
        let Err(second) = open().claim("one") else { panic!("two sandboxes of one name") };
        assert_eq!(second.to_string(), "a sandbox named 'one' is running already");
        assert_eq!(open().names().unwrap_or_default(), ["one"]);
        drop((claim, listener));
        assert!(open().names().unwrap_or_default().is_empty());
        // What a killed process leaves.
        std::fs::create_dir(path.join("two")).unwrap();
        drop(UnixListener::bind(path.join("two/control")).unwrap());
        let (claim, _listener) = open().claim("two").unwrap_or_else(|e| panic!("{e}"));
        drop(claim);
        std::fs::create_dir(path.join("three")).unwrap();
        drop(UnixListener::bind(path.join("three/control")).unwrap());
        assert!(open().clean("three") && !path.join("three").exists());
        std::fs::remove_dir(path).unwrap();
    }

    #[test]
    fn a_directory_open_to_others_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let (path, _) = runtime("mode");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o750)).unwrap();
        assert!(Runtime::open_at(path.clone()).is_err());
        std::fs::remove_dir(&path).unwrap();
        assert!(Runtime::open_at(path.clone()).is_ok_and(|r| r.is_none()));
        std::os::unix::fs::symlink("/", &path).unwrap();
        assert!(Runtime::open_at(path.clone()).is_err(), "a link is not followed");
        std::fs::remove_file(path).unwrap();
    }
}

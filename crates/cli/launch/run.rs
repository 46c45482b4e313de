//! Starts plain command lines `towline run --at PREFIX=URL -- COMMAND ...`, which nearly all are: does what
//! `run::start` does, without loading the rest of the program. Anything unusual, and any failure, is left to
//! the program.

use crate::Beginning;
use crate::layout::{
    BETWEEN_AT, CONFIG_AT, DEVICE_MAJOR, FOLDER_BYTES_MAX, MAGIC, NOT_IN_FOLDER, PLACEHOLDERS,
    STATE, STATE_BYTES, VARIABLE,
};
use crate::loader::memory;
use crate::system::{
    CLOCK_GETTIME, CLOEXEC, CLONE, EXECVE, FACCESSAT, FGETXATTR, FLOCK, FSTATAT, FTRUNCATE, GETCWD,
    GETRANDOM, HERE, MKDIRAT, OPENAT, PIDFD_OPEN, PRCTL, PRLIMIT, PWRITE, RT_SIGPROCMASK, SETSID,
    STATFS, UNLINKAT, call, close, complain, exit, missing_streams, open, process, read, umask,
    user,
};
use crate::text::{INTERPRETER, Text, decimal, elf, string};

/// The name of the preloaded library's file, and its length.
const LIBRARY: &str = env!("TOWLINE_LIBRARY");
const LIBRARY_BYTES: &str = env!("TOWLINE_LIBRARY_BYTES");
/// Age in seconds of the recorded use of the library at which it must be recorded again.
const NOTED: u64 = 300;
/// Environment variable that names libraries to load first.
const PRELOAD: &[u8] = b"LD_PRELOAD";

/// Maximum length of a path.
const PATH: usize = 512;
/// Maximum length of prefix and URL together.
const NAMES: usize = 1024;
/// Maximum number of environment variables.
const VARIABLES: usize = 512;
/// Bytes of a program to examine.
const FIRST_BYTES: usize = 1024;

type Path = Text<PATH>;

/// A parsed command line: the value of `--at`, and the number of the argument with which the command begins.
struct Line {
    at: &'static [u8],
    command: usize,
}

/// Becomes the program. Returns if the command line is not a plain one, and in the keeper, whose command line
/// it has set.
pub(crate) fn run(beginning: &Beginning) {
    if let Some(begun) = line(beginning).and_then(|line| begin(beginning, &line)) {
        part(beginning, &begun);
    }
}

/// Parses the command line. Returns `None` if it is not a plain one.
fn line(beginning: &Beginning) -> Option<Line> {
    if beginning.argument(1) != b"run" {
        return None;
    }
    let (at, next) = match beginning.argument(2) {
        b"--at" => (beginning.argument(3), 4),
        inline => (inline.strip_prefix(b"--at=")?, 3),
    };
    let is_plain = beginning.argument(next) == b"--" && !beginning.argument(next + 1).is_empty();
    is_plain.then_some(Line { at, command: next + 1 })
}

/// A run that is ready to start.
struct Begun {
    directory: Path,
    library: Path,
    program: Path,
    command: usize,
    /// A pidfd of this process.
    seen: usize,
}

/// Prepares the run. Returns `None` if anything is unusual or fails.
fn begin(beginning: &Beginning, line: &Line) -> Option<Begun> {
    let (prefix, url) = prefix_and_url(line.at)?;
    if missing_streams().contains(&true) || !fits(beginning) || !may_make_state() {
        return None;
    }
    let home = home(beginning)?;
    let program = program(beginning, beginning.argument(line.command), prefix)?;
    let library = Path::of(&[home.get(), b"/", LIBRARY.as_bytes(), b"\0"])?;
    let seen = seen_by_orphans()?;
    let lock = library_is_there(&library);
    // As in `run::start`: the user's umask is meant for files of the program.
    let mask = umask(0o077);
    let made = lock.and_then(|_| directory(&home, &library, prefix, url));
    umask(mask);
    let Some(directory) = made else {
        lock.into_iter().chain([seen]).for_each(close);
        return None;
    };
    Some(Begun { directory, library, program, command: line.command, seen })
}

/// Splits the value of `--at` if it is plain, so that its text can be used as it stands.
fn prefix_and_url(at: &[u8]) -> Option<(&[u8], &[u8])> {
    let cut = at.windows(9).position(|part| part == b"=towline:" || part == b"=towline+")?;
    let (prefix, url) = (at.get(..cut)?, at.get(cut + 1..)?);
    let is_plain = |path: &[u8]| {
        path.len() > 1
            && path.starts_with(b"/")
            && !path.ends_with(b"/")
            && !path.windows(2).any(|two| two == b"//" || two == b"/.")
    };
    let is_text = |text: &[u8]| {
        text.iter().all(|byte| byte.is_ascii_alphanumeric() || b"/._-".contains(byte))
    };
    let after = |scheme: &[u8]| url.strip_prefix(scheme)?.strip_prefix(b"://");
    let cut = |text: &'_ [u8], byte: u8| text.iter().position(|found| *found == byte);
    let is_meant = match after(b"towline+tcp").or_else(|| after(b"towline")) {
        Some(rest) => {
            let (host, path) = rest.split_at(cut(rest, b'/')?);
            let (name, port) = match cut(host, b':') {
                Some(colon) => (host.get(..colon)?, host.get(colon + 1..)?),
                None => (host, &b"1"[..]),
            };
            let number = |so_far: u32, digit: &u8| {
                so_far.checked_mul(10)?.checked_add(char::from(*digit).to_digit(10)?)
            };
            let is_port = port.iter().try_fold(0, number).is_some_and(|n| n > 0 && n < 1 << 16);
            !name.is_empty() && is_text(name) && is_port && is_plain(path) && is_text(path)
        }
        None => {
            let rest = after(b"towline+unix").or_else(|| after(b"towline+shm"))?;
            let (path, query) = rest.split_at(cut(rest, b'?')?);
            let socket = query.strip_prefix(b"?socket=")?;
            is_plain(path) && is_text(path) && socket.starts_with(b"/") && is_text(socket)
        }
    };
    (is_meant && is_plain(prefix)).then_some((prefix, url))
}

/// Returns true if the new environment fits into the memory here.
fn fits(beginning: &Beginning) -> bool {
    let others = beginning.variable(PRELOAD).unwrap_or_default();
    beginning.environment().count() + 3 <= VARIABLES && others.len() + PATH + 16 <= NAMES
}

/// Returns false if the limit on file sizes forbids a file as long as the state: making it would end this process by
/// `SIGXFSZ`.
fn may_make_state() -> bool {
    const FILE_BYTES: usize = 1;
    let mut limit = [0u64; 2];
    // SAFETY: `limit` is as long as the kernel's structure.
    let asked = unsafe { call(PRLIMIT, [0, FILE_BYTES, 0, limit.as_mut_ptr() as usize]) };
    asked.is_none() || limit[0] >= STATE_BYTES as u64
}

/// Memory laid out as `struct stat`.
struct Status([u64; 18]);

impl Status {
    /// Returns the status of an open file.
    fn of(file: usize) -> Option<Self> {
        const EMPTY_PATH: usize = 0x1000;
        Self::at(file, c"".as_ptr() as usize, EMPTY_PATH)
    }

    /// Returns the status of a path without following a final symbolic link.
    fn of_path(path: &Path) -> Option<Self> {
        const NO_FOLLOW: usize = 0x100;
        Self::at(HERE, path.address(), NO_FOLLOW)
    }

    fn at(folder: usize, path: usize, how: usize) -> Option<Self> {
        let mut status = [0; 18];
        // SAFETY: the path ends with a zero byte, and `status` is at least as long as the kernel's structure.
        unsafe { call(FSTATAT, [folder, path, status.as_mut_ptr() as usize, how]) }?;
        Some(Self(status))
    }

    #[cfg(target_arch = "x86_64")]
    fn links(&self) -> u64 {
        self.0[2]
    }

    #[cfg(target_arch = "x86_64")]
    fn mode(&self) -> u32 {
        self.0[3] as u32
    }

    #[cfg(target_arch = "aarch64")]
    fn links(&self) -> u64 {
        self.0[2] >> 32
    }

    #[cfg(target_arch = "aarch64")]
    fn mode(&self) -> u32 {
        self.0[2] as u32
    }

    fn user(&self) -> u32 {
        (self.0[3] >> if cfg!(target_arch = "x86_64") { 32 } else { 0 }) as u32
    }

    fn bytes(&self) -> u64 {
        self.0[6]
    }

    fn changed(&self) -> u64 {
        self.0[11]
    }

    fn is(&self, kind: u32) -> bool {
        self.mode() & 0o170_000 == kind
    }
}

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;

/// Returns this user's folder for runs if it exists with the right owner and mode.
fn home(beginning: &Beginning) -> Option<Path> {
    let variable = |name: &[u8], other| beginning.variable(name).unwrap_or(other);
    let parents = [variable(b"XDG_RUNTIME_DIR", b""), b"/dev/shm", variable(b"TMPDIR", b"/tmp")];
    let is_usable = |parent: &&[u8]| parent.starts_with(b"/") && !forbids_programs(parent);
    let parent = parents.into_iter().find(is_usable)?;
    let (user, _) = user();
    let path = Path::of(&[parent, b"/towline-", decimal(user).get(), b"\0"])?;
    let folder = path.get().strip_suffix(b"\0")?;
    if folder.len() > FOLDER_BYTES_MAX || folder.iter().any(|byte| NOT_IN_FOLDER.contains(byte)) {
        return None;
    }
    let found = Status::of_path(&path)?;
    let is_good = found.is(DIRECTORY) && found.user() == user && found.mode() & 0o022 == 0;
    Path::of(&[folder]).filter(|_| is_good)
}

/// Returns true for a folder where nothing may be executed, so that the library could not be mapped.
fn forbids_programs(folder: &[u8]) -> bool {
    const NOEXEC: u64 = 8;
    let mut system = [0u64; 15];
    let asked = Path::of(&[folder, b"\0"]).and_then(|path| {
        // SAFETY: the path ends with a zero byte, and `system` is as long as the kernel's structure.
        unsafe { call(STATFS, [path.address(), system.as_mut_ptr() as usize]) }
    });
    asked.is_some() && system[10] & NOEXEC != 0
}

/// Finds the program as a shell does. Returns `None` if the library does not reach it or it may be remote.
fn program(beginning: &Beginning, name: &[u8], prefix: &[u8]) -> Option<Path> {
    let is_below = |path: &[u8]| {
        path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
    };
    if name.contains(&b'/') {
        let whole = match name.strip_prefix(b"/") {
            Some(_) => Path::of(&[name])?,
            None => Path::of(&[working()?.get(), b"/", name.strip_prefix(b"./").unwrap_or(name)])?,
        };
        let mut parts = whole.get().split(|byte| *byte == b'/').skip(1);
        let is_unusual = parts.any(|part| matches!(part, b"" | b"." | b".."));
        return Path::of(&[name, b"\0"])
            .filter(|path| !is_below(whole.get()) && !is_unusual && is_reached(path));
    }
    let folders = || beginning.variable(b"PATH").unwrap_or_default().split(|byte| *byte == b':');
    // An empty folder stands for the working directory.
    if folders().any(|folder| !folder.starts_with(b"/") || is_below(folder)) {
        return None;
    }
    let found = folders().find_map(|folder| {
        let path = Path::of(&[folder, b"/", name, b"\0"])?;
        let how = [HERE, path.address(), 1];
        // SAFETY: the path ends with a zero byte.
        unsafe { call(FACCESSAT, how) }.map(|_| path)
    });
    found.filter(is_reached)
}

/// Returns the path of the working directory, unless it is the root or has none.
fn working() -> Option<Path> {
    let mut bytes = [0; PATH];
    // SAFETY: `bytes` has the length passed.
    unsafe { call(GETCWD, [bytes.as_mut_ptr() as usize, bytes.len()]) }?;
    let path = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    Path::of(&[path]).filter(|_| path.len() > 1 && path.starts_with(b"/"))
}

/// Returns true for a program for this machine that uses glibc and grants no rights, and for scripts that
/// such a program runs.
fn is_reached(path: &Path) -> bool {
    let mut first = [0; FIRST_BYTES];
    let first = look(path, &mut first);
    match first.and_then(|first| first.strip_prefix(b"#!")) {
        None => first.and_then(has_our_linker).unwrap_or(false),
        Some(line) => interpreter(line).is_some_and(|interpreter| {
            let mut first = [0; FIRST_BYTES];
            look(&interpreter, &mut first).and_then(has_our_linker).unwrap_or(false)
        }),
    }
}

/// Returns the interpreter of a script, unless that is `env`, which looks for another one.
fn interpreter(line: &[u8]) -> Option<Path> {
    let line = line.split(|byte| *byte == b'\n').next()?.trim_ascii();
    let path = line.split(u8::is_ascii_whitespace).next()?;
    Path::of(&[path, b"\0"]).filter(|_| !path.ends_with(b"/env"))
}

/// Returns the first bytes of a program, unless it grants rights.
fn look<'a>(path: &Path, first: &'a mut [u8]) -> Option<&'a [u8]> {
    let file = open(path.get())?;
    let status = Status::of(file);
    let is_program = status.is_some_and(|status| {
        status.is(REGULAR) && status.mode() & 0o111 == 0o111 && status.mode() & 0o6000 == 0
    });
    let mut value = [0u8; 64];
    let capability = c"security.capability".as_ptr() as usize;
    let how = [file, capability, value.as_mut_ptr() as usize, value.len()];
    // SAFETY: `value` has the length passed, and the name ends with a zero byte.
    let has_capabilities = unsafe { call(FGETXATTR, how) }.is_some();
    let first = read(file, first);
    close(file);
    first.filter(|_| is_program && !has_capabilities)
}

/// Returns whether a program names glibc's dynamic linker; `None` if it names none.
fn has_our_linker(first: &[u8]) -> Option<bool> {
    let linker = elf(first)?.1.find(|part| part.kind == INTERPRETER)?;
    let linker = first.get(linker.offset..)?.get(..linker.file_bytes)?;
    Some(linker.rsplit(|byte| *byte == b'/').next()?.starts_with(b"ld-linux"))
}

/// Opens and locks the library, if it exists and its use has been recorded lately. The lock lasts until the
/// returned descriptor is closed.
fn library_is_there(path: &Path) -> Option<usize> {
    const SHARED: usize = 1;
    let file = open(path.get())?;
    let is_good = || {
        let mut now = [0u64; 2];
        // SAFETY: `flock` touches no memory, and `now` is as long as the kernel's structure of two words.
        unsafe {
            call(FLOCK, [file, SHARED])?;
            call(CLOCK_GETTIME, [0, now.as_mut_ptr() as usize])?;
        }
        let status = Status::of(file)?;
        let is_long = decimal(status.bytes() as u32).get() == LIBRARY_BYTES.as_bytes();
        // The file may have been removed before it was locked.
        let is_there = is_long && status.links() > 0;
        Some(is_there && now[0].saturating_sub(status.changed()) <= NOTED)
    };
    if is_good() == Some(true) {
        return Some(file);
    }
    close(file);
    None
}

/// Creates a new directory for this run, with the shared state.
fn directory(home: &Path, library: &Path, prefix: &[u8], url: &[u8]) -> Option<Path> {
    const MODE: usize = 0o700;
    let number = decimal(process());
    let path = Path::of(&[home.get(), b"/run-", number.get(), b"-0\0"])?;
    let (placeholders, state) = (below(&path, PLACEHOLDERS)?, below(&path, STATE)?);
    // SAFETY: the paths end with a zero byte.
    unsafe {
        call(MKDIRAT, [HERE, path.address(), MODE])?;
        let made = call(MKDIRAT, [HERE, placeholders.address(), MODE]);
        if made.and_then(|_| make_state(&state, library, prefix, url)).is_none() {
            remove(&path);
            return None;
        }
    }
    Some(path)
}

/// Returns the path of a name in the directory of a run.
fn below(directory: &Path, name: &str) -> Option<Path> {
    Path::of(&[directory.get().strip_suffix(b"\0")?, b"/", name.as_bytes(), b"\0"])
}

/// Removes what was made. The program then tries again and reports the error.
fn remove(directory: &Path) {
    let remove = |name: &str, how: usize| {
        // SAFETY: the path ends with a zero byte.
        below(directory, name)
            .and_then(|path| unsafe { call(UNLINKAT, [HERE, path.address(), how]) })
    };
    const DIRECTORY: usize = 0x200;
    remove(STATE, 0);
    remove(PLACEHOLDERS, DIRECTORY);
    remove("", DIRECTORY);
}

/// Writes the state of a run with one prefix, in the format of `State::prepare` and `Config::to_bytes`.
fn make_state(path: &Path, library: &Path, prefix: &[u8], url: &[u8]) -> Option<()> {
    const NEW: usize = 0o2 | 0o100 | 0o200 | CLOEXEC;
    let mut random = [0; 8];
    // SAFETY: `random` has the length passed.
    unsafe { call(GETRANDOM, [random.as_mut_ptr() as usize, random.len(), 0]) }?;
    let mut config = Text::<NAMES>::new();
    config.push_word(u64::from_ne_bytes(random) | 1)?;
    config.push_word(0)?;
    config.push_piece(library.get().strip_suffix(b"\0")?)?;
    config.push_piece(b"")?;
    config.push_word(1)?;
    config.push_piece(prefix)?;
    config.push_piece(url)?;
    config.push_word(u64::from(DEVICE_MAJOR) << 8)?;
    let mut head = Text::<16>::new();
    head.push_word(MAGIC)?;
    head.push_word(config.get().len() as u64)?;
    // SAFETY: the path ends with a zero byte, and the texts have the lengths passed.
    unsafe {
        let file = call(OPENAT, [HERE, path.address(), NEW, 0o600])?;
        let done = call(FTRUNCATE, [file, STATE_BYTES]).and_then(|_| {
            call(PWRITE, [file, config.address(), config.get().len(), CONFIG_AT])?;
            call(PWRITE, [file, head.address(), head.get().len(), 0])
        });
        close(file);
        done.map(drop)
    }
}

/// Returns a pidfd of this process, by which the keeper notices its end. Returns `None` if orphans would
/// become children of this process, which would then see the keeper.
fn seen_by_orphans() -> Option<usize> {
    const TAKES_ORPHANS: usize = 37;
    let own = process() as usize;
    let mut takes = 0u32;
    // SAFETY: the first call writes one word, to `takes`; the second takes two numbers.
    unsafe {
        call(PRCTL, [TAKES_ORPHANS, &raw mut takes as usize])?;
        (own != 1 && takes == 0).then_some(())?;
        call(PIDFD_OPEN, [own, 0])
    }
}

/// Splits this process in two, like `run/fork.rs`: this one becomes the program, the other one, an orphan,
/// the keeper. This function does not wait for the process between them, which would take long if other
/// processes keep the processors busy. The library waits for it before the program does anything that would
/// reveal it (`preload/src/between.rs`).
fn part(beginning: &Beginning, begun: &Begun) {
    // No flags, and no signal at the child's end.
    const SILENT: [usize; 5] = [0; 5];
    let own = process();
    // SAFETY: as for `fork`; there is only one thread.
    match unsafe { call(CLONE, SILENT) } {
        // SAFETY: as above.
        Some(0) => match unsafe { call(CLONE, SILENT) } {
            Some(0) => keep(beginning, begun, own),
            keeper => exit(usize::from(keeper.is_none())),
        },
        Some(between) => {
            // If this fails, the process between stays until the program has ended; the program sees it only
            // with `__WALL`.
            note(begun, between as u32);
            execute(beginning, begun);
        }
        None => {
            remove(&begun.directory);
            close(begun.seen);
        }
    }
}

/// Tells the library about the process between.
fn note(begun: &Begun, between: u32) -> Option<()> {
    const TO_WRITE: usize = 2 | CLOEXEC;
    let path = below(&begun.directory, STATE)?;
    // SAFETY: the path ends with a zero byte, and one word is written from `between`.
    unsafe {
        let file = call(OPENAT, [HERE, path.address(), TO_WRITE])?;
        let done =
            call(PWRITE, [file, &raw const between as usize, size_of_val(&between), BETWEEN_AT]);
        close(file);
        done.map(drop)
    }
}

/// Prepares the keeper: sets its command line to `towline keep DIRECTORY PROCESS DESCRIPTOR`.
fn keep(beginning: &Beginning, begun: &Begun, program: u32) {
    // The signals that the keeper blocks, as in `run/fork.rs`: HUP, INT, QUIT, USR1, USR2, PIPE, TERM.
    let held = [1, 2, 3, 10, 12, 13, 15].iter().fold(0u64, |set, signal| set | 1 << (signal - 1));
    // SAFETY: `held` has the length passed; `setsid` touches no memory.
    unsafe {
        call(RT_SIGPROCMASK, [0, &raw const held as usize, 0, size_of_val(&held)]);
        call(SETSID, []);
    }
    let (directory, program, seen) =
        (begun.directory.get(), decimal(program), decimal(begun.seen as u32));
    let line = Text::<{ PATH + 32 }>::of(&[directory, program.get(), b"\0", seen.get(), b"\0"]);
    let Some((line, memory)) = line.zip(memory(PATH + 32)) else { exit(127) };
    let at = memory as *mut u8;
    // SAFETY: the memory has room for the text, and the two do not overlap.
    unsafe { at.copy_from_nonoverlapping(line.get().as_ptr(), line.get().len()) };
    let program_at = at.wrapping_add(directory.len());
    beginning.replace(1, c"keep".as_ptr().cast());
    beginning.replace(2, at);
    beginning.replace(3, program_at);
    beginning.replace(4, program_at.wrapping_add(program.get().len() + 1));
}

/// Becomes the program.
fn execute(beginning: &Beginning, begun: &Begun) -> ! {
    let is_for = |variable: *const u8, name: &[u8]| {
        // SAFETY: the environment consists of strings that end with a zero byte and live as long as the
        // process.
        let variable = unsafe { string(variable) };
        variable.strip_prefix(name).is_some_and(|rest| rest.starts_with(b"="))
    };
    let others = beginning.variable(PRELOAD).unwrap_or_default();
    let colon: &[u8] = if others.is_empty() { b"" } else { b":" };
    let library = begun.library.get().strip_suffix(b"\0").unwrap_or_default();
    let preload = Text::<NAMES>::of(&[PRELOAD, b"=", library, colon, others, b"\0"]);
    let run = Text::<NAMES>::of(&[VARIABLE.as_bytes(), b"=", begun.directory.get()]);
    let mut environment = Text::<{ VARIABLES * size_of::<usize>() }>::new();
    let listed = preload.as_ref().zip(run.as_ref()).and_then(|(preload, run)| {
        environment.push_word(preload.address() as u64)?;
        environment.push_word(run.address() as u64)?;
        for variable in beginning.environment() {
            if !is_for(variable, PRELOAD) && !is_for(variable, VARIABLE.as_bytes()) {
                environment.push_word(variable as u64)?;
            }
        }
        environment.push_word(0)
    });
    if listed.is_some() {
        let arguments = beginning.arguments_from(begun.command) as usize;
        // SAFETY: the path ends with a zero byte, and both lists consist of such strings and end with null.
        // The call returns only if it fails.
        unsafe { call(EXECVE, [begun.program.address(), arguments, environment.address()]) };
    }
    complain(b"towline: run: the program cannot be executed\n");
    exit(126)
}

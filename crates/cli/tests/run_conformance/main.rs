//! `towline run`: C programs that print everything they see print the same on a local and on a remote
//! directory. Each is a list of cases (`programs/*.c`).

#![allow(clippy::unwrap_used)] // a test that cannot go on should say where

#[path = "../support/mod.rs"]
mod support;
mod users;

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use support::compare::{Libc, compiled, same, same_over};
use support::{TOWLINE, World, have, under_run, wait_until};

/// Cases of `holders.c` that need no rights.
const HOLDERS_ANYWHERE: [&str; 6] = [
    "writing-threads-and-new-programs",
    "stopped-writers",
    "stopped-writers-without-their-first-thread",
    "records-of-stopped-writers",
    "stopped-readers",
    "masks-and-concurrent-forks",
];

#[test]
fn descriptors_behave() {
    same(Libc::Shared, "descriptors.c", &[]);
}

#[test]
fn arguments_that_the_kernel_refuses_are_refused() {
    same(Libc::Shared, "refused.c", &[]);
}

/// Only files without a name have seals, on some file systems.
#[test]
fn files_have_no_seals() {
    if !have("python3") {
        return;
    }
    let world = World::new();
    fs::write(world.local("served/f"), "").unwrap();
    let script = "python3 -c 'if 1:
        import fcntl, errno, os
        path = os.environ[\"AT\"] + \"/f\"
        for mode in (os.O_RDONLY, os.O_RDWR):
            for command, argument in ((fcntl.F_GET_SEALS, 0), (fcntl.F_ADD_SEALS, 1)):
                try:
                    print(fcntl.fcntl(os.open(path, mode), command, argument))
                except OSError as error:
                    print(errno.errorcode[error.errno])
    '";
    let output = under_run(&world, script);
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(said, "EINVAL\nEPERM\nEINVAL\nEINVAL\n", "{output:?}");
}

#[test]
fn locks_of_processes_that_end_are_given_to_others() {
    same(Libc::Shared, "locked.c", &[]);
}

/// Processes of one number in different PID namespaces, stopped ones, and new programs in the place of busy ones.
#[test]
fn holders_of_locks_are_told_apart() {
    let alone = ["--pid", "--fork", "true"];
    let can = Command::new("unshare").args(alone).status().is_ok_and(|status| status.success());
    if can {
        return same(Libc::Shared, "holders.c", &[]);
    }
    println!("SKIPPED: locks-in-namespaces needs the right to make PID namespaces");
    for case in HOLDERS_ANYWHERE {
        same(Libc::Shared, "holders.c", &[case]);
    }
}

#[test]
fn children_of_vfork_leave_their_parents_as_they_were() {
    same(Libc::Shared, "vfork.c", &[]);
}

#[test]
fn files_that_are_read_in_short_pieces_behave() {
    same(Libc::Shared, "ahead.c", &[]);
}

#[test]
fn descriptors_that_are_used_again_behave() {
    same(Libc::Shared, "reused.c", &[]);
}

#[test]
fn what_others_do_in_the_midst_of_a_call_behaves() {
    same(Libc::Shared, "between.c", &[]);
}

/// Returns how often a process has a local file open.
fn opened(process: u32, file: &Path) -> usize {
    let all = fs::read_dir(format!("/proc/{process}/fd")).unwrap();
    all.flatten().filter(|fd| fs::read_link(fd.path()).is_ok_and(|to| to == file)).count()
}

/// Starts a program that waits for its standard input, and returns once it has said this line.
fn spawned_until(command: &mut Command, line: &str) -> Child {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    let mut output = std::io::BufReader::new(child.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut output, &mut said).unwrap();
    assert_eq!(said, line);
    child
}

/// Even if the process that closed the last of them makes no more requests.
#[test]
fn what_is_closed_is_closed_on_the_server() {
    let world = World::new();
    let program = compiled(Libc::Shared, &world, "reused.c");
    let folder = world.local("served/folder");
    fs::create_dir(&folder).unwrap();
    let file = folder.join("file");
    fs::write(&file, "text").unwrap();
    for transport in ["tcp", "shm"] {
        let prefix = world.local("at");
        let at = format!("{}={}", prefix.display(), world.through(transport, "dir"));
        let mut command = Command::new(TOWLINE);
        command.args(["run", "--at", &at, "--"]);
        command.args([program.as_os_str(), "idle".as_ref()]).arg(prefix.join("folder/file"));
        let mut child = spawned_until(&mut command, "idle\n");
        wait_until(&format!("the server has closed it, over {transport}"), || {
            opened(world.server_id(), &file) == 0
        });
        assert!(child.try_wait().unwrap().is_none(), "it should be waiting");
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
    }
}

/// However a program ends that has a file mapped.
#[test]
fn what_is_mapped_is_closed_on_the_server() {
    if !have("python3") {
        return println!("SKIPPED mapped files: there is no python3");
    }
    let world = World::new();
    let file = world.local("served/file");
    fs::write(&file, vec![b'x'; 1 << 20]).unwrap();
    let script = "
import ctypes, os, sys
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + 3 * [ctypes.c_int] + [ctypes.c_long]
for end in os._exit, sys.exit:
    for length in 4096, 1 << 20:
        if os.fork() == 0:
            at = libc.mmap(None, length, 3, 1, os.open(sys.argv[1], os.O_RDWR), 0)
            ctypes.memset(at + length - 1, 65, 1)
            end(0)
        assert os.wait()[1] == 0
print('mapped', flush=True)
sys.stdin.read()";
    let prefix = world.local("at");
    let mut command = Command::new(TOWLINE);
    command
        .args(["run", "--at", &format!("{}={}", prefix.display(), world.url("dir")), "--"])
        .args(["python3", "-c", script])
        .arg(prefix.join("file"));
    let mut child = spawned_until(&mut command, "mapped\n");
    wait_until("the server has closed it", || opened(world.server_id(), &file) == 0);
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    let now = fs::read(&file).unwrap();
    assert_eq!([now[4095], now[(1 << 20) - 1]], *b"AA");
}

#[test]
fn watched_files_behave() {
    same(Libc::Shared, "watches.c", &[]);
}

#[test]
fn names_of_programs_behave() {
    same(Libc::Shared, "named.c", &[]);
}

#[test]
fn handlers_of_sigsys_behave() {
    same(Libc::Shared, "sigsys.c", &[]);
}

#[test]
fn names_that_lead_across_behave() {
    same(Libc::Shared, "ways.c", &[]);
}

#[test]
fn streams_behave() {
    same(Libc::Shared, "streams.c", &[]);
}

#[test]
fn large_mappings_that_are_stored_to_behave() {
    if !support::maps_on_demand() {
        return;
    }
    same(Libc::Shared, "stored.c", &[]);
}

#[test]
fn large_mappings_behave() {
    if !support::maps_on_demand() {
        return;
    }
    same(Libc::Shared, "mapped.c", &[]);
}

#[test]
fn stores_to_files_whose_length_changes_stay() {
    same(Libc::Shared, "sized.c", &[]);
}

#[test]
fn processes_and_locks_behave() {
    same(Libc::Shared, "processes.c", &[]);
}

#[test]
fn limits_of_the_length_of_files_are_kept() {
    same(Libc::Shared, "limits.c", &[]);
}

/// Over TCP, where only the server decides who may connect.
#[test]
fn processes_that_become_another_user_behave() {
    same_over(&["tcp"], Libc::Shared, "users.c", &[]);
}

#[test]
fn names_that_end_in_slashes_and_dots_behave() {
    same(Libc::Shared, "endings.c", &[]);
}

#[test]
fn moved_directories_and_changed_mappings_behave() {
    same(Libc::Shared, "moved.c", &[]);
}

#[test]
fn handlers_of_signals_behave() {
    same(Libc::Shared, "signals.c", &[]);
}

#[test]
fn cancelled_threads_end_where_they_should() {
    same(Libc::Shared, "cancelled.c", &[]);
}

#[test]
fn walks_behave() {
    same(Libc::Shared, "walks.c", &[]);
}

#[test]
fn made_up_names_patterns_and_messages_behave() {
    same(Libc::Shared, "texts.c", &[]);
}

#[test]
fn background_programs_keep_their_files() {
    let world = World::new();
    fs::write(world.local("served/f"), "one\ntwo\n").unwrap();
    let script = "mkfifo $HERE/go; (read first; read x < $HERE/go; read second;
        echo $first $second > $AT/new; mv $AT/new $AT/done) < $AT/f > /dev/null 2>&1 & exit 3";
    let output = under_run(&world, script);
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(!world.local("served/done").exists());
    fs::write(world.local("go"), "\n").unwrap();
    wait_until("the background program has finished", || world.local("served/done").exists());
    assert_eq!(fs::read_to_string(world.local("served/done")).unwrap(), "one two\n");
}

/// Programs that have nothing of the run in memory: static ones, and those that have just been executed.
#[test]
fn background_programs_without_the_library_keep_the_run() {
    let world = World::new();
    fs::write(world.local("served/f"), "one\n").unwrap();
    let source = "#include <stdio.h>\n#include <unistd.h>\nint main(int n, char **a) { (void)n; char c; \
        FILE *go = fopen(a[1], \"r\"); if (!go || fread(&c, 1, 1, go) != 1) return 1; \
        execl(\"/bin/sh\", \"sh\", \"-c\", \"cat $AT/f > $HERE/part; mv $HERE/part $HERE/done\", (char *)0); }";
    fs::write(world.local("wait.c"), source).unwrap();
    let (output, program) = (world.local("wait.c"), world.local("wait"));
    let mut compiler = Command::new("cc");
    compiler.args(["-static", "-o"]).args([&program, &output]).stderr(Stdio::null());
    if !compiler.status().is_ok_and(|status| status.success()) {
        println!("SKIPPED: no static programs can be made here");
        return;
    }
    let script = "mkfifo $HERE/go; $HERE/wait $HERE/go > /dev/null 2>&1 &";
    let output = under_run(&world, script);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // Opened for both, so that it does not wait for the other side.
    let mut go = fs::File::options().read(true).write(true).open(world.local("go")).unwrap();
    std::io::Write::write_all(&mut go, b"\n").unwrap();
    wait_until("the background program has finished", || world.local("done").exists());
    assert_eq!(fs::read_to_string(world.local("done")).unwrap(), "one\n");
}

/// Who reads from a descriptor that the program has inherited does not wait for a background program that
/// has closed it, nor for the keeper, which stays as long as that.
#[test]
fn what_a_program_inherits_is_its_own() {
    let world = World::new();
    fs::write(world.local("served/f"), "one\n").unwrap();
    let prefix = |name: &str| format!("{}={}", world.local(name).display(), world.url("dir"));
    let script = "cat $0/f >&3; sleep 30 3>&- >/dev/null 2>&1 & echo $! >&3";
    for other in [&[][..], &["--at", &prefix("other")]] {
        let mut run = Command::new("sh");
        run.args(["-c", "exec \"$@\" 3>&1 >/dev/null", "sh", TOWLINE, "run", "--at"]);
        run.arg(prefix("at")).args(other).args(["--", "sh", "-c", script]).arg(world.local("at"));
        let output = run.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let id = said.strip_prefix("one\n").expect("the file").trim();
        let is_there = fs::read_link(format!("/proc/{id}/exe")).is_ok();
        let _ = Command::new("kill").arg(id).stderr(Stdio::null()).status();
        assert!(is_there, "{other:?}: the reader waited for the background program");
    }
}

/// Everything that the shell has closed, ignored or blocked is so for the program, and nothing else.
#[test]
fn programs_start_as_they_would_alone() {
    let world = World::new();
    let at = format!("{}={}", world.local("at").display(), world.url("dir"));
    let script = "trap '' PIPE USR1; umask 027; exec 7</dev/null; ulimit -n 200
        $@ sh -c 'grep -E \"^(Sig(Blk|Ign|Cgt)|Umask)\" /proc/self/status; ulimit -n; cd /proc/self/fd; echo *'";
    // The last two are not plain command lines and start in another way.
    let runs = [
        format!("{TOWLINE} run --at {at} --"),
        format!("{TOWLINE} run --at {at} --at /else{} --", &at[at.find('=').unwrap()..]),
        format!("{TOWLINE} run --at {at} --report --"),
    ];
    let said = |prefix: &str| {
        let mut shell = Command::new("sh");
        shell.args(["-c", script, "sh"]).args(prefix.split(' ').filter(|word| !word.is_empty()));
        let output = shell.stdin(Stdio::null()).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let plain = said("");
    assert!(plain.contains("Umask"), "{plain}");
    for run in runs {
        assert_eq!(said(&run), plain, "{run}");
    }
}

/// Closed streams do no harm: data written to one must not end up in a file of the run.
#[test]
fn closed_streams_do_no_harm() {
    let world = World::new();
    fs::write(world.local("served/f"), "one\n").unwrap();
    let at = format!("{}={}", world.local("at").display(), world.url("dir"));
    let script = format!(
        "{TOWLINE} run --at {at} -- sh -c 'echo to out; echo to err >&2; cat < $AT/f > $AT/g' <&- >&- 2>&-"
    );
    let mut shell = Command::new("sh");
    let status = shell.args(["-c", &script]).env("AT", world.local("at")).status().unwrap();
    assert!(status.success(), "{status}");
    assert_eq!(fs::read_to_string(world.local("served/g")).unwrap(), "one\n");
}

#[test]
fn libraries_load_from_there() {
    let world = World::new();
    fs::create_dir(world.local("served/lib")).unwrap();
    fs::create_dir(world.local("served/bin")).unwrap();
    let write = |name: &str, text: &str| fs::write(world.local(name), text).unwrap();
    write("inner.c", "int inner(void) { return 4; }");
    write("outer.c", "int inner(void); int outer(void) { return inner() * 10 + 2; }");
    write(
        "main.c",
        "#include <stdio.h>\n#include <unistd.h>\nint outer(void);\nint main(void) { char exe[999] = {0}; \
         readlink(\"/proc/self/exe\", exe, 998); printf(\"%d %s\\n\", outer(), exe); }",
    );
    write(
        "open.c",
        "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <link.h>\n#include <stdio.h>\n\
         static int tell(struct dl_phdr_info *i, size_t n, void *at) { (void)n; \
         if ((void *)i->dlpi_addr == at) puts(i->dlpi_name); return 0; }\nint main(int n, char **a) { (void)n; \
         void *l = dlopen(a[1], RTLD_NOW), *f; if (!l) { puts(dlerror()); return 1; } \
         Dl_info info; f = dlsym(l, \"outer\"); dladdr(f, &info); \
         printf(\"%d %s\\n\", ((int (*)(void))f)(), info.dli_fname); dl_iterate_phdr(tell, info.dli_fbase); }",
    );
    write(
        "apart.c",
        "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <stdio.h>\nint main(int n, char **a) { (void)n; \
         void *l = dlmopen(LM_ID_NEWLM, a[1], RTLD_NOW); if (!l) { puts(dlerror()); return 1; } \
         printf(\"%d\\n\", ((int (*)(void))dlsym(l, \"outer\"))()); }",
    );
    let script = "set -e; cd $HERE
        cc -shared -fPIC -o served/lib/libinner.so inner.c
        cc -shared -fPIC -o served/lib/libouter.so outer.c -Lserved/lib -linner
        cc -o served/bin/main main.c -Lserved/lib -louter -Wl,-rpath-link,served/lib
        cc -o served/bin/origin main.c -Lserved/lib -louter -Wl,-rpath-link,served/lib \
            -Wl,-rpath,'$ORIGIN/../lib' -Wl,--disable-new-dtags
        cc -o open open.c -ldl; cc -o apart apart.c -ldl";
    let output = Command::new("sh").args(["-c", script]).env("HERE", &world.path).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let script = "LD_LIBRARY_PATH=$AT/lib $AT/bin/main; $AT/bin/origin
        LD_LIBRARY_PATH=$AT/lib $HERE/open $AT/lib/libouter.so
        LD_LIBRARY_PATH=$AT/lib sh -c '$HERE/open libouter.so'
        LD_LIBRARY_PATH=$AT/lib env $AT/bin/main
        LD_LIBRARY_PATH=$AT/lib $HERE/apart $AT/lib/libouter.so; $HERE/apart $AT/lib/none.so | grep -c 'No such file'
        $HERE/open $AT/lib/none.so | grep -c 'No such file'";
    let output = under_run(&world, script);
    let said = String::from_utf8_lossy(&output.stdout).replace(world.path.to_str().unwrap(), "");
    let wanted = "42 /at/bin/main\n42 /at/bin/origin\n42 /at/lib/libouter.so\n/at/lib/libouter.so\n42 /at/lib/libouter.so\n/at/lib/libouter.so\n42 /at/bin/main\n42\n1\n1\n";
    assert_eq!(said, wanted, "{}", String::from_utf8_lossy(&output.stderr));
}

/// Libraries that are found only by the search path in a program, or in the library that asks for them.
#[test]
fn libraries_load_by_search_paths_of_their_own() {
    let world = World::new();
    for folder in ["lib", "bin"] {
        fs::create_dir(world.local("served").join(folder)).unwrap();
    }
    let write = |name: &str, text: &str| fs::write(world.local(name), text).unwrap();
    write("inner.c", "int inner(void) { return 4; }");
    write("other.c", "int inner(void) { return 5; }");
    write(
        "linked.c",
        "#include <stdio.h>\nint inner(void);\nint main(void) { printf(\"%d\\n\", inner()); return 0; }",
    );
    write(
        "asks.c",
        "#include <dlfcn.h>\nint asks(void) { void *l = dlopen(\"libinner.so\", RTLD_NOW); \
         return l ? ((int (*)(void))dlsym(l, \"inner\"))() : -1; }",
    );
    write(
        "main.c",
        "#include <stdio.h>\nint asks(void);\n\
         int main(void) { printf(\"%d %d\\n\", asks(), asks()); return 0; }",
    );
    let script = "set -e; cd $HERE/served
        cc -shared -fPIC -o lib/libinner.so ../inner.c
        for tags in enable disable; do
            cc -o bin/origin-$tags ../main.c ../asks.c -Wl,-rpath,'$ORIGIN/../lib' -Wl,--$tags-new-dtags
            cc -o bin/fixed-$tags ../main.c ../asks.c -Wl,-rpath,$AT/lib -Wl,--$tags-new-dtags
            cc -o bin/braces-$tags ../main.c ../asks.c -Wl,-rpath,'${ORIGIN}/../lib' -Wl,--$tags-new-dtags
        done
        cc -shared -fPIC -o lib/libasks.so ../asks.c -Wl,-rpath,'$ORIGIN'
        cc -o ../local ../main.c -Llib -lasks -Wl,-rpath,$AT/lib
        cc -o ../asks-itself ../main.c ../asks.c -Wl,-rpath,$AT/lib
        cc -o ../nowhere ../main.c ../asks.c
        mkdir ../opt; cc -shared -fPIC -o ../opt/libinner.so ../other.c
        cc -o ../here-first ../main.c ../asks.c -Wl,-rpath,$HERE/opt:$AT/lib
        cc -o ../there-first ../main.c ../asks.c -Wl,-rpath,$AT/lib:$HERE/opt
        cc -o ../linked ../linked.c -Llib -linner -Wl,-rpath,$HERE/opt:$AT/lib";
    let mut command = Command::new("sh");
    command.args(["-c", script]).env("HERE", &world.path).env("AT", world.local("at"));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let script = "for program in $AT/bin/* $HERE/local $HERE/asks-itself $HERE/nowhere $HERE/*-first $HERE/linked; do
            echo ${program##*/} $($program)
        done";
    let output = under_run(&world, script);
    let said = String::from_utf8_lossy(&output.stdout);
    let wanted = "braces-disable 4 4\nbraces-enable 4 4\nfixed-disable 4 4\nfixed-enable 4 4\norigin-disable 4 4\n\
                  origin-enable 4 4\nlocal 4 4\nasks-itself 4 4\nnowhere -1 -1\nhere-first 5 5\nthere-first 4 4\nlinked 5\n";
    assert_eq!(said, wanted, "{}", String::from_utf8_lossy(&output.stderr));
}

/// Returns the functions that the library takes over.
fn taken_over() -> Vec<&'static str> {
    let table = include_str!("../../../preload/src/table.rs");
    let mut names: Vec<&str> = table
        .lines()
        .filter_map(|line| line.strip_prefix("    ["))
        .flat_map(|line| line.split(']').next().unwrap().split(' '))
        .collect();
    names.extend(["execl", "execlp", "execle", "dlopen", "dlmopen", "vfork", "__vfork"]);
    names.extend(["dprintf", "__dprintf_chk"]);
    names
}

/// Returns true if a name matches `pattern`, in which a star stands for anything.
fn fits(name: &str, pattern: &str) -> bool {
    match pattern.split_once('*') {
        None => name == pattern,
        Some((start, rest)) => name.strip_prefix(start).is_some_and(|name| {
            rest.is_empty() || (0..=name.len()).any(|at| fits(&name[at..], rest))
        }),
    }
}

#[test]
fn every_function_of_libc_is_taken_over_or_needs_not() {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let libc = maps.split_whitespace().find(|word| word.ends_with("/libc.so.6")).unwrap();
    let Ok(listed) = Command::new("nm").args(["-D", "--defined-only", libc]).output() else {
        eprintln!("SKIPPED: no nm (binutils)");
        return;
    };
    let taken = taken_over();
    let patterns: Vec<&str> = include_str!("libc-names")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .flat_map(str::split_whitespace)
        .collect();
    let is_known =
        |name: &str| taken.contains(&name) || patterns.iter().any(|pattern| fits(name, pattern));
    let listed = String::from_utf8(listed.stdout).unwrap();
    let mut count = 0;
    let mut unknown: Vec<&str> = Vec::new();
    for line in listed.lines().filter(|line| !line.contains("GLIBC_PRIVATE")) {
        let mut words = line.split_whitespace().skip(1);
        let (Some("T" | "W" | "i"), Some(name)) = (words.next(), words.next()) else { continue };
        let name = name.split('@').next().unwrap();
        count += 1;
        if !is_known(name) {
            unknown.push(name);
        }
    }
    assert!(count > 1500, "only {count} functions found in {libc}");
    assert!(
        unknown.is_empty(),
        "new in {libc}: take them over (preload/src/table.rs) or say in tests/run_conformance/libc-names why not: {unknown:?}"
    );
    for pattern in &patterns {
        assert!(
            !taken.contains(pattern),
            "{pattern} is in the table and in tests/run_conformance/libc-names"
        );
    }
}

#[test]
fn every_function_of_the_table_is_ours() {
    let world = World::new();
    let program = compiled(Libc::Shared, &world, "whose.c");
    let names = taken_over();
    assert!(names.len() > 230, "only {} names found in the table", names.len());
    let at = format!("{}={}", world.local("at").display(), world.url("dir"));
    let mut child = Command::new(TOWLINE)
        .args(["run", "--at", &at, "--"])
        .arg(&program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all((names.join("\n") + "\n").as_bytes()).unwrap();
    let said = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    assert_eq!(said.lines().count(), names.len());
    for line in said.lines() {
        assert!(line.contains("/preload-"), "not taken over: {line}");
    }
}

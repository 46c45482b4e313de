//! Builds the library that `towline run` preloads, so that it travels inside the program, and what the
//! program begins with (`launch`).
//!
//! The library is built by a cargo of its own, as a release build whatever this one is, in a folder of this
//! build; nothing is downloaded, since its dependencies are those of the program.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Crates that the library is made of.
const CRATES: [&str; 6] = ["preload", "instance", "client", "net", "mem", "wire"];

fn main() {
    let variable = |name: &str| env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"));
    let root = Path::new(&variable("CARGO_MANIFEST_DIR")).join("../..");
    for name in CRATES {
        for part in ["src", "Cargo.toml"] {
            println!(
                "cargo::rerun-if-changed={}",
                root.join("crates").join(name).join(part).display()
            );
        }
    }
    println!("cargo::rerun-if-changed={}", root.join("Cargo.toml").display());
    println!("cargo::rerun-if-changed=build.rs");
    // Beside this build's own folder (`target/PROFILE/build/towline-HASH/out`), so that debug and
    // release builds share it.
    let out = PathBuf::from(variable("OUT_DIR"));
    let target_dir = out.ancestors().nth(4).unwrap_or(&out).join("preload");
    let target = variable("TARGET");
    let link = out.join("link");
    let mut flags = String::from("-Clink-arg=-static-libgcc");
    if target.starts_with("x86_64") {
        // Where it begins as a program, which hosts another one.
        flags.push_str(" -Clink-arg=-Wl,--entry=towline_host");
    }
    if link_unwinder_statically(&link) {
        flags.push_str(&format!(" -Lnative={}", link.display()));
        // `towline` itself is started for each run, too.
        println!("cargo::rustc-link-search=native={}", link.display());
        println!("cargo::rustc-link-arg-bins=-static-libgcc");
    }
    let mut cargo = Command::new(variable("CARGO"));
    cargo
        .current_dir(&root)
        .args([
            "build",
            "--release",
            "--quiet",
            "--offline",
            "-p",
            "towline-preload",
            "--target",
            &target,
        ])
        .arg("--target-dir")
        .arg(&target_dir)
        // Not one library more to load for each program.
        .env("RUSTFLAGS", flags)
        // Quick to build again after a change in one crate; calls across crates are few here.
        .env("CARGO_PROFILE_RELEASE_LTO", "false")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
        .env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "none");
    // What is meant for the outer build: `cargo clippy` would have nothing built.
    for name in [
        "RUSTC_WORKSPACE_WRAPPER",
        "RUSTC_WRAPPER",
        "CARGO_TARGET_DIR",
        "CARGO_BUILD_TARGET_DIR",
        "CARGO_ENCODED_RUSTFLAGS",
    ] {
        cargo.env_remove(name);
    }
    let status = cargo.status().unwrap_or_else(|error| panic!("cannot run cargo: {error}"));
    assert!(status.success(), "the library for `towline run` cannot be built");
    let library = target_dir.join(&target).join("release/libtowline_preload.so");
    println!("cargo::rustc-env=TOWLINE_PRELOAD={}", library.display());
    let bytes = fs::read(&library).unwrap_or_else(|error| panic!("{}: {error}", library.display()));
    let name = format!("preload-{:08x}-{}.so", crc32c::crc32c(&bytes), bytes.len());
    println!("cargo::rustc-env=TOWLINE_LIBRARY={name}");
    println!("cargo::rustc-check-cfg=cfg(launch)");
    println!("cargo::rerun-if-changed=launch");
    if ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"].contains(&target.as_str()) {
        match build_launch(&out, &target, &name, bytes.len()) {
            Ok(entry) => {
                println!("cargo::rustc-env=TOWLINE_LAUNCH_ENTRY={entry}");
                println!("cargo::rustc-cfg=launch");
                println!("cargo::rustc-link-arg-bins=-Wl,--no-dynamic-linker,-e,towline_begin");
            }
            Err(why) => println!("cargo::warning=`towline run` will start slower: launch {why}"),
        }
    }
}

/// Compiles `launch`, and takes the code out of what the linker made of it: it needs to be loaded by nobody.
/// Gives the place in it where it begins.
fn build_launch(
    out: &Path,
    target: &str,
    library: &str,
    library_bytes: usize,
) -> Result<usize, String> {
    let linked = out.join("launch.elf");
    let mut rustc = Command::new(env::var_os("RUSTC").ok_or("has no compiler")?);
    if let Some(linker) = env::var_os("RUSTC_LINKER") {
        let mut option = OsString::from("linker=");
        option.push(linker);
        rustc.arg("-C").arg(option);
    }
    rustc
        .args(["launch/main.rs", "--edition", "2024", "--crate-name", "launch"])
        .args(["--crate-type", "bin", "--target", target])
        .args(["-Copt-level=s", "-Cpanic=abort", "-Ccodegen-units=1", "-Cstrip=symbols"])
        // No table of addresses for calls: nobody would fill it in.
        .arg("-Crelro-level=off")
        .args(["-Clink-arg=-nostartfiles", "-Clink-arg=-nostdlib"])
        .arg("-Clink-arg=-Wl,--no-dynamic-linker,-z,norelro,-z,max-page-size=4096,--build-id=none")
        .arg("-o")
        .arg(&linked)
        .env("TOWLINE_LIBRARY", library)
        .env("TOWLINE_LIBRARY_BYTES", library_bytes.to_string());
    if !rustc.status().is_ok_and(|status| status.success()) {
        return Err("cannot be compiled".to_owned());
    }
    let elf = fs::read(&linked).map_err(|error| format!("cannot be read: {error}"))?;
    let number = |at: usize, bytes: usize| {
        elf[at..at + bytes].iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte))
    };
    const LOAD: usize = 1;
    const DYNAMIC: usize = 2;
    const WRITABLE: usize = 2;
    /// Of the table of relocations.
    const BYTES_OF_RELOCATIONS: usize = 8;
    const RELOCATION_BYTES: usize = 24;
    let mut code = Vec::new();
    for header in (0..number(56, 2)).map(|index| number(32, 8) + index * 56) {
        let (kind, flags) = (number(header, 4), number(header + 4, 4));
        let (from, to, bytes) =
            (number(header + 8, 8), number(header + 16, 8), number(header + 32, 8));
        if kind == LOAD && flags & WRITABLE == 0 {
            code.resize(to, 0);
            code.extend_from_slice(&elf[from..from + bytes]);
        }
        // One may be there, of what would unwind.
        let relocates = |at: usize| {
            number(at, 8) == BYTES_OF_RELOCATIONS && number(at + 8, 8) > RELOCATION_BYTES
        };
        if kind == DYNAMIC && (from..from + bytes).step_by(16).any(relocates) {
            return Err("has something to be relocated".to_owned());
        }
    }
    // The compiler does not see that a file changes which assembler code includes: it looks at the name.
    let file = out.join(format!("launch-{:08x}.bin", crc32c::crc32c(&code)));
    fs::write(&file, code).map_err(|error| format!("cannot be written: {error}"))?;
    println!("cargo::rustc-env=TOWLINE_LAUNCH={}", file.display());
    Ok(number(24, 8))
}

/// std names the shared `libgcc_s` itself, whatever `-static-libgcc` says, and loading that costs
/// every program of a run a quarter of a millisecond. A linker script of that name, found first,
/// stands for the static one. False where there is no static one.
fn link_unwinder_statically(folder: &Path) -> bool {
    // What cargo was told to link with, for other machines, too.
    let linker = env::var_os("RUSTC_LINKER").unwrap_or_else(|| OsString::from("cc"));
    let found = Command::new(linker).arg("-print-file-name=libgcc_eh.a").output();
    // Without a file of that name the compiler prints the name alone.
    if !found.is_ok_and(|found| found.stdout.starts_with(b"/")) {
        return false;
    }
    let script = folder.join("libgcc_s.so");
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(&script, "INPUT(-lgcc_eh -lgcc)\n"))
        .unwrap_or_else(|error| panic!("{}: {error}", script.display()));
    true
}

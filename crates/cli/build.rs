//! Builds the library that `towline run` preloads, so that it travels inside the program.
//!
//! It is built by a cargo of its own, as a release build whatever this one is, in a folder of this
//! build; nothing is downloaded, since its dependencies are those of the program.

use std::env;
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
    println!("cargo::rustc-env=TOWLINE_PRELOAD_CRC={:08x}", crc32c::crc32c(&bytes));
}

/// std names the shared `libgcc_s` itself, whatever `-static-libgcc` says, and loading that costs
/// every program of a run a quarter of a millisecond. A linker script of that name, found first,
/// stands for the static one. False where there is no static one.
fn link_unwinder_statically(folder: &Path) -> bool {
    let found = Command::new("cc").arg("-print-file-name=libgcc_eh.a").output();
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

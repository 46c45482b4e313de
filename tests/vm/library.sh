# Functions for the tests of attached disks, which source this file. The tests run as root in a virtual
# machine whose kernel has ublk and NBD: they load modules, mount file systems, and kill what they started.
#   TOWLINE: the program to test
set -eu
: "${TOWLINE:?the program to test}"
work=$(mktemp -d /run/attach.XXXXXX)
socket=$work/socket
mnt=$work/mnt
mkdir -p "$mnt"
url() { # url DISK
    case $way in
    native) echo "towline+unix:///$1?socket=$socket.native" ;;
    *) echo "nbd+unix:///$1?socket=$socket" ;;
    esac
}
passed=0 failed=0 skipped=0
# Limit in seconds: a test that takes longer hangs.
TEST_SECONDS=${TEST_SECONDS:-600}
only= # part of the names of the tests to run
server=
boot=/proc/sys/kernel/random/boot_id # the file that names the boot of the server's machine

serve() { # serve DISK... : starts a server, or the same one again
    [ $# = 0 ] || disks=$*
    words=
    for disk in $disks; do words="$words --disk $disk"; done
    rm -f "$socket" "$socket.native"
    # The server's own mounts must not keep the device in use that is mounted while it starts.
    # shellcheck disable=SC2086,SC2016 # these are words; expanded by the other shell
    RUST_LOG=warn unshare -m sh -c \
        'umount -q "$1" || true; mount --bind "$0" /proc/sys/kernel/random/boot_id; shift; exec "$@"' "$boot" "$mnt" \
        "$TOWLINE" serve $words --nbd "unix://$socket" \
        --listen "unix://$socket.native" >>"$work/serve.log" 2>&1 &
    server=$!
    until_true 60 "the server listens" [ -S "$socket" ]
    until_true 60 "the server listens" [ -S "$socket.native" ]
}
kill_server() { kill -9 "$server"; wait "$server" 2>/dev/null || true; }
stop_server() { kill "$server"; wait "$server" 2>/dev/null || true; }

until_true() { # until_true SECONDS WHAT COMMAND... : waits for success, or fails with a message
    tries=$(($1 * 10)) what=$2
    shift 2
    until "$@"; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || { echo "waited too long until $what" >&2; return 1; }
        sleep 0.1
    done
}
attach() { device=$(RUST_LOG=info timeout 120 "$TOWLINE" attach "$@"); }
detach() { timeout 120 "$TOWLINE" detach "$device"; }
process() { # prints the process that serves the device
    "$TOWLINE" attach --list | awk -v d="$device" '$1 == d { print $4 }'
}
state() { "$TOWLINE" attach --list | awk -v d="$device" '$1 == d { print $3 }'; }
is_waiting() { [ "$(state)" = waiting ]; }
kill_attach() { kill -9 "$(process)"; until_true 60 "the process is gone" is_waiting; }
resume() { RUST_LOG=info timeout 120 "$TOWLINE" attach --resume >/dev/null; }

forget_cache() { sync; echo 3 >/proc/sys/vm/drop_caches; }
make() { # make ext4|xfs
    case $1 in
    ext4) mkfs.ext4 -q -F "$device" ;;
    xfs) mkfs.xfs -q -f "$device" ;;
    esac
}
check() { # check ext4|xfs : checks that the file system is clean without any repair
    case $1 in
    ext4) e2fsck -f -n "$device" >"$work/fsck" 2>&1 || { cat "$work/fsck" >&2; return 1; } ;;
    xfs) xfs_repair -n "$device" >"$work/fsck" 2>&1 || { cat "$work/fsck" >&2; return 1; } ;;
    esac
}
replay() { # replay ext4|xfs : replays the journal with a mount, after which the file system has to be clean
    mount "$device" "$mnt"
    umount "$mnt"
    check "$1"
}
fill() { # writes large files and small synced ones, several at once, and records their checksums
    writers=
    for number in 1 2; do
        dd if=/dev/urandom of="$mnt/large$number" bs=1M count=4 conv=fsync status=none &
        writers="$writers $!"
        dd if=/dev/urandom of="$mnt/small$number" bs=4k count=8 oflag=dsync status=none &
        writers="$writers $!"
    done
    for writer in $writers; do wait "$writer"; done
    (cd "$mnt" && md5sum large* small*) >"$work/sums"
}
compare() { forget_cache; (cd "$mnt" && md5sum -c --quiet "$work/sums"); }

no_leftovers() { # checks that nothing of Towline is left in the machine
    [ -z "$("$TOWLINE" attach --list)" ]
    [ -z "$(ls -A /run/towline/attached)" ]
    refused ls /dev/ublkb* /dev/ublkc* /sys/block/nbd*/pid
    refused grep "$work" /proc/mounts
    until_true 60 "no process serves a device" no_process
}
no_process() { ! pgrep -f 'towline attach --foreground' >/dev/null; }

run() { # run NAME FUNCTION ARGUMENT... : runs one test in a subshell that stops at the first failure
    name=$1
    shift
    case $name in *"$only"*) ;; *) return ;; esac
    started=$(cut -d. -f1 /proc/uptime)
    # Not in a condition, where `set -e` would have no effect.
    set +e
    (set -e; "$@") >"$work/log" 2>&1 &
    test=$!
    # Kills a test that takes too long, and reports what runs.
    (
        sleep "$TEST_SECONDS" &
        trap "kill $!; exit" TERM
        wait $!
        echo "took longer than $TEST_SECONDS s; what runs:" >>"$work/log"
        ps -eo pid,ppid,stat,wchan:30,args >>"$work/log"
        kill "$test"
    ) 2>/dev/null &
    watch=$!
    wait "$test"
    status=$?
    kill "$watch" 2>/dev/null
    set -e
    took=$(($(cut -d. -f1 /proc/uptime) - started))
    case $status in
    0) passed=$((passed + 1)) && echo "ok $name ($took s)" ;;
    77) skipped=$((skipped + 1)) && echo "SKIPPED $name: $(tail -1 "$work/log")" ;;
    *)
        failed=$((failed + 1))
        echo "FAILED $name (status $status, $took s)"
        sed 's/^/    /' "$work/log"
        tail -3 "$work/serve.log" | sed 's/^/    server: /'
        cat /run/towline/attached/*.log 2>/dev/null | tail -6 | sed 's/^/    attach: /'
        dmesg | tail -4 | sed 's/^/    kernel: /'
        clean_up
        ;;
    esac
}
clean_up() { # cleans up after a failure
    umount -l "$mnt" 2>/dev/null || true
    for left in $("$TOWLINE" attach --list | awk '{ print $1 }'); do
        timeout 60 "$TOWLINE" detach --force "$left" || true
    done
    pkill -9 -f "$TOWLINE serve" || true
}
refused() { # refused COMMAND... : the command has to fail; `set -e` ignores commands after "!"
    if "$@"; then
        echo "should have failed: $*"
        return 1
    fi
}
skip() { echo "$*"; exit 77; }
finish() {
    rm -rf "$work"
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" = 0 ]
}

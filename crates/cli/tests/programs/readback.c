/* Does the same random things to a remote file and to a local one, in several processes in turn, and compares all
 * results: `readback REMOTE LOCAL SEED STEPS PROCESSES`. Both are directories. What a program has just written it may
 * read back from memory, and then must find what the file contains. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { FILES = 3, FDS = 5, LONGEST = 200000 };

static uint64_t state;
static const char *tops[2];
/* Descriptors of the remote and of the local files. */
static int fds[FDS][2];
static FILE *streams[2];
static unsigned seed, step, process, processes;
static char said[256];
static unsigned char data[2][LONGEST + 1];

static uint32_t draw(uint32_t below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 20) % below;
}

static void wrong(const char *why, long one, long other) {
    fprintf(stderr, "seed %u, process %u, step %u: %s: %s: %ld, not %ld\n", seed, process, step, said, why, one, other);
    exit(1);
}

/* Where something is done: mostly close to where something was done before. */
static long place(void) {
    static long last;
    switch (draw(8)) {
    case 0: return last = draw(LONGEST);
    case 1: return last = draw(3000000);
    case 2: return last = 0;
    case 3: return last = draw(5000);
    case 4: return last / 4096 * 4096;
    default: return last += draw(200);
    }
}

static long size(void) {
    switch (draw(10)) {
    case 0: return draw(LONGEST);
    case 1: return draw(70000);
    case 2: return 4096;
    case 3: return 0;
    default: return 1 + draw(600);
    }
}

static const char *name(int side, int number) {
    static char names[4][PATH_MAX];
    static int turn;
    char *text = names[turn++ % 4];
    snprintf(text, PATH_MAX, "%s/f%d", tops[side], number);
    return text;
}

static void fill(long count) {
    for (long at = 0; at < count; at++) data[0][at] = (unsigned char)draw(256);
    memcpy(data[1], data[0], count);
}

/* Both sides must agree on a result. */
static void same(long result[2], int errors[2]) {
    if (result[0] != result[1]) wrong("result", result[0], result[1]);
    if (result[0] < 0 && errors[0] != errors[1]) wrong("error", errors[0], errors[1]);
}

/* Does something on both sides; `side` is the number of the side in `call`. */
#define BOTH(call)                                       \
    ({                                                   \
        long results[2];                                 \
        int errors[2];                                   \
        for (int side = 0; side < 2; side++) {           \
            errno = 0;                                   \
            results[side] = (long)(call);                \
            errors[side] = errno;                        \
        }                                                \
        same(results, errors);                           \
        results[0];                                      \
    })

/* Reads on both sides; the rest of the memory must stay as it is. */
#define READ(call)                                                                   \
    do {                                                                             \
        memset(data, 0x5a, sizeof data);                                             \
        BOTH(call);                                                                  \
        for (size_t byte = 0; byte < sizeof *data; byte++)                           \
            if (data[0][byte] != data[1][byte]) wrong("byte", byte, data[0][byte]);  \
    } while (0)

static void open_one(int which) {
    static const int flags[] = {O_RDWR, O_RDWR | O_CREAT, O_RDWR | O_CREAT | O_TRUNC, O_RDWR | O_APPEND, O_RDONLY, O_WRONLY,
                                O_RDWR | O_CREAT | O_EXCL, O_RDWR | O_DSYNC};
    int how = flags[draw(sizeof flags / sizeof *flags)], number = (int)draw(FILES);
    snprintf(said, sizeof said, "open f%d %#o", number, how);
    for (int side = 0; side < 2; side++)
        if (fds[which][side] >= 0) close(fds[which][side]);
    int opened[2], errors[2];
    for (int side = 0; side < 2; side++) {
        opened[side] = open(name(side, number), how, 0644);
        errors[side] = errno;
        fds[which][side] = opened[side];
    }
    if ((opened[0] < 0) != (opened[1] < 0)) wrong("open", errors[0], errors[1]);
}

static long end_of(int fd) {
    struct stat status;
    return fstat(fd, &status) == 0 ? status.st_size : -1;
}

/* A stream that is read and written in turns, as those of linkers. */
static void stream(int number) {
    snprintf(said, sizeof said, "stream f%d", number);
    for (int side = 0; side < 2; side++) streams[side] = fopen(name(side, number), "r+");
    if (!streams[0] != !streams[1]) wrong("fopen", !streams[0], !streams[1]);
    if (!streams[0]) return;
    for (int turn = 0; turn < 8; turn++) {
        long at = place() % 50000, count = size() % 3000;
        int from_end = draw(3) == 0;
        BOTH(fseek(streams[side], from_end ? -(at % 100) : at, from_end ? SEEK_END : SEEK_SET));
        BOTH(ftell(streams[side]));
        if (draw(2)) {
            fill(count);
            BOTH(fwrite(data[side], 1, count, streams[side]));
        } else {
            READ(fread(data[side], 1, count, streams[side]));
        }
    }
    BOTH(fclose(streams[side]));
}

static void do_one(void) {
    int which = (int)draw(FDS), *fd = fds[which], *other = fds[draw(FDS)], number = (int)draw(FILES);
    long at = place(), count = size(), half = count / 2;
    int kind = (int)draw(32);
    snprintf(said, sizeof said, "%d of %d, %ld at %ld", kind, which, count, at);
    switch (kind) {
    case 0: case 1: case 2: case 3: case 4:
        fill(count);
        BOTH(pwrite(fd[side], data[side], count, at));
        break;
    case 5: case 6: case 7:
        fill(count);
        BOTH(write(fd[side], data[side], count));
        break;
    case 8: case 9: case 10: case 11: READ(pread(fd[side], data[side], count, at)); break;
    case 12: case 13: READ(read(fd[side], data[side], count)); break;
    case 14: BOTH(lseek(fd[side], at, SEEK_SET)); break;
    case 15: BOTH(lseek(fd[side], -(at % 300), SEEK_END)); break;
    case 16: BOTH(lseek(fd[side], at % 300, SEEK_CUR)); break;
    case 17: BOTH(end_of(fd[side])); break;
    case 18: BOTH(ftruncate(fd[side], at)); break;
    case 19: BOTH(truncate(name(side, number), at)); break;
    case 20: BOTH(fallocate(fd[side], FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, at, count + 1)); break;
    case 21: BOTH(fallocate(fd[side], 0, at, count + 1)); break;
    case 22: {
        off_t from[2] = {at, at}, to[2] = {place(), 0};
        to[1] = to[0];
        if (end_of(fd[1]) < 0 || end_of(other[1]) < 0) break;
        struct stat one, two;
        fstat(fd[1], &one), fstat(other[1], &two);
        if (one.st_ino != two.st_ino) BOTH(copy_file_range(fd[side], &from[side], other[side], &to[side], count, 0));
        break;
    }
    case 23: {
        struct iovec parts[2][2];
        for (int side = 0; side < 2; side++) {
            parts[side][0] = (struct iovec){data[side], half};
            parts[side][1] = (struct iovec){data[side] + half, count - half};
        }
        if (draw(2)) {
            fill(count);
            BOTH(pwritev(fd[side], parts[side], 2, at));
        } else {
            READ(preadv2(fd[side], parts[side], 2, at, 0));
        }
        break;
    }
    case 24: open_one(which); break;
    case 25:
        if (draw(4)) return open_one(which);
        BOTH(rename(name(side, number), name(side, (number + 1) % FILES)));
        break;
    case 26:
        if (draw(4)) return open_one(which);
        BOTH(unlink(name(side, number)));
        break;
    case 27: BOTH(dup2(fd[side], other[side]) == other[side]); break;
    case 28: {
        /* A child that has the same descriptors. */
        fill(count);
        pid_t child = fork();
        if (child == 0) {
            BOTH(pwrite(fd[side], data[side], count, at));
            READ(pread(fd[side], data[side], count + 9, at));
            _exit(0);
        }
        int status;
        if (waitpid(child, &status, 0) != child || status) wrong("child", status, 0);
        READ(pread(fd[side], data[side], count, at));
        break;
    }
    case 29: stream(number); break;
    case 30: {
        long length = end_of(fd[1]);
        if (length <= 0 || (fcntl(fd[1], F_GETFL) & O_ACCMODE) != O_RDWR) break;
        unsigned char *maps[2];
        for (int side = 0; side < 2; side++)
            maps[side] = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd[side], 0);
        if (maps[0] == MAP_FAILED || maps[1] == MAP_FAILED) wrong("mmap", maps[0] == MAP_FAILED, maps[1] == MAP_FAILED);
        if (memcmp(maps[0], maps[1], length)) wrong("mapped", 0, 0);
        memset(maps[0] + at % length, step & 255, 1), memset(maps[1] + at % length, step & 255, 1);
        if (draw(2)) READ(pread(fd[side], data[side], count, at % length));
        for (int side = 0; side < 2; side++) munmap(maps[side], length);
        break;
    }
    default:
        fill(count);
        BOTH(pwrite(fd[side], data[side], count, at));
        READ(pread(fd[side], data[side], LONGEST < count + 100 ? LONGEST : count + 100, at > 50 ? at - 50 : at));
    }
}

static void compare_all(void) {
    for (int number = 0; number < FILES; number++) {
        snprintf(said, sizeof said, "at the end, f%d", number);
        for (int side = 0; side < 2; side++) {
            if (fds[0][side] >= 0) close(fds[0][side]);
            fds[0][side] = open(name(side, number), O_RDONLY);
        }
        for (long at = 0; at < 3500000; at += LONGEST) READ(pread(fds[0][side], data[side], LONGEST, at));
    }
}

/* Takes turns with the other processes: what one has done, the next one must see. */
static void take_turns(int mine, int next, unsigned steps) {
    state = (seed * 64u + process + 1) * 0x9e3779b97f4a7c15u;
    for (int which = 0; which < FDS; which++) fds[which][0] = fds[which][1] = -1;
    for (unsigned char ended = 0; ended < processes;) {
        if (read(mine, &ended, 1) != 1) exit(1);
        for (int which = 0; step == 0 && which < FDS; which++) open_one(which);
        unsigned burst = step < steps ? 1 + draw(30) : 0;
        for (; burst > 0 && step < steps; burst--) {
            do_one();
            if (++step == steps) {
                compare_all();
                ended++;
            }
        }
        if (write(next, &ended, 1) != 1 && ended < processes) exit(1);
    }
    exit(0);
}

int main(int count, char **arguments) {
    if (count != 6) return 2;
    tops[0] = arguments[1], tops[1] = arguments[2];
    seed = (unsigned)atoi(arguments[3]);
    unsigned steps = (unsigned)atoi(arguments[4]);
    processes = (unsigned)atoi(arguments[5]);
    signal(SIGPIPE, SIG_IGN);
    int pipes[8][2];
    pid_t children[8];
    for (unsigned number = 0; number < processes; number++)
        if (pipe(pipes[number])) return 3;
    for (process = 0; process < processes; process++) {
        children[process] = fork();
        if (children[process] == 0) {
            int mine = pipes[process][0], next = pipes[(process + 1) % processes][1];
            for (unsigned number = 0; number < processes; number++)
                for (int end = 0; end < 2; end++)
                    if (pipes[number][end] != mine && pipes[number][end] != next) close(pipes[number][end]);
            take_turns(mine, next, steps);
        }
    }
    if (write(pipes[0][1], "", 1) != 1) return 4; /* nobody has ended */
    for (unsigned number = 0; number < processes; number++) close(pipes[number][0]), close(pipes[number][1]);
    int failed = 0;
    for (unsigned number = 0; number < processes; number++) {
        int status;
        if (waitpid(children[number], &status, 0) < 0 || status) failed = 1;
    }
    return failed;
}

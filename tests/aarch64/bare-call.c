/* bare-call PATH: opens a file with a system call that does not go through libc. */
#include <fcntl.h>
#include <sys/syscall.h>

int main(int count, char **arguments) {
    register long at asm("x0") = AT_FDCWD;
    register long path asm("x1") = (long)arguments[count - 1];
    register long flags asm("x2") = O_RDONLY;
    register long number asm("x8") = SYS_openat;
    asm volatile("svc 0" : "+r"(at) : "r"(path), "r"(flags), "r"(number) : "memory");
    return at < 0;
}

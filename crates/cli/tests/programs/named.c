/* The name and path that a program sees when it was executed through links and scripts. Compiled for any
 * libc. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static void run(const char *path, const char *folder) {
    char search[4200], here[4000] = "";
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        if (folder) {
            getcwd(here, sizeof here);
            snprintf(search, sizeof search, "%s/%s:/bin", here, folder);
            setenv("PATH", search, 1);
        }
        execlp(path, path, "say", (char *)NULL);
        perror(path);
        _exit(1);
    }
    waitpid(child, NULL, 0);
}

static void copy(int from, int to) {
    char buffer[4096];
    for (ssize_t length; (length = read(from, buffer, sizeof buffer)) > 0;) write(to, buffer, length);
    close(from);
    close(to);
}

static void script(const char *path, const char *interpreter) {
    char text[4200], here[4000] = "";
    getcwd(here, sizeof here);
    int fd = open(path, O_WRONLY | O_CREAT, 0755), length = snprintf(text, sizeof text, "#!%s/%s option\n", here, interpreter);
    write(fd, text, length);
    close(fd);
}

int main(int count, char **arguments) {
    if (count > 1) {
        char name[32] = "", path[4096] = "";
        prctl(PR_GET_NAME, name);
        readlink("/proc/self/exe", path, sizeof path - 1);
        printf("%s is called %s, executes %s,", strrchr(arguments[0], '/') ? strrchr(arguments[0], '/') : arguments[0], name, strrchr(path, '/'));
        printf(" is told %s, with %d\n", getenv("TOWLINE_CALLED") ? getenv("TOWLINE_CALLED") : "nothing", count);
        return 0;
    }
    copy(open("/proc/self/exe", O_RDONLY), open("program", O_WRONLY | O_CREAT, 0755));
    mkdir("folder", 0755);
    symlink("program", "link");
    symlink("../link", "folder/far");
    script("a-script-with-a-long-name", "program");
    script("by-link", "link");
    symlink("by-link", "linked-script");
    script("of-script", "by-link");
    const char *paths[] = {"./program", "./link", "folder/far", "./a-script-with-a-long-name", "./by-link", "./linked-script", "./of-script"};
    for (int i = 0; i < 7; i++) run(paths[i], NULL);
    run("far", "folder");
    unlink("program");
    /* These contain their interpreters' absolute paths. */
    unlink("a-script-with-a-long-name");
    unlink("by-link");
    unlink("of-script");
    return 0;
}

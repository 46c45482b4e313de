/* Prints, for each function named on standard input, which library a program gets it from. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int main(void) {
    char name[256];
    while (fgets(name, sizeof name, stdin)) {
        name[strcspn(name, "\n")] = 0;
        Dl_info info = {0};
        void *at = dlsym(RTLD_DEFAULT, name);
        printf("%s %s\n", name, at && dladdr(at, &info) ? info.dli_fname : "nowhere");
    }
    return 0;
}

/* A service of the C library's user database (nss(5)), as an LDAP directory would be: it has one user, who is in two
 * more groups, and answers nothing while the file $SLOW exists. */
#define _GNU_SOURCE
#include <errno.h>
#include <grp.h>
#include <nss.h>
#include <pwd.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define USER 54321
#define GROUP 777
#define NAME "remote"

enum nss_status _nss_towline_getpwuid_r(uid_t uid, struct passwd *user, char *buffer, size_t length, int *error)
{
    const char *slow = getenv("SLOW");
    if (uid != USER)
        return NSS_STATUS_NOTFOUND;
    while (slow && access(slow, F_OK) == 0)
        usleep(1000);
    if (length < sizeof NAME) {
        *error = ERANGE;
        return NSS_STATUS_TRYAGAIN;
    }
    strcpy(buffer, NAME);
    *user = (struct passwd){
        .pw_name = buffer, .pw_passwd = "x", .pw_uid = USER, .pw_gid = USER, .pw_gecos = "", .pw_dir = "/", .pw_shell = "/bin/sh",
    };
    return NSS_STATUS_SUCCESS;
}

enum nss_status _nss_towline_initgroups_dyn(const char *name, gid_t skip, long *start, long *size, gid_t **groups,
                                            long limit, int *error)
{
    const gid_t more[] = {GROUP, 0};
    (void)skip, (void)limit;
    if (strcmp(name, NAME) != 0)
        return NSS_STATUS_NOTFOUND;
    for (size_t which = 0; which < sizeof more / sizeof *more; which++) {
        if (*start == *size) {
            gid_t *larger = realloc(*groups, 2 * *size * sizeof **groups);
            if (!larger) {
                *error = ENOMEM;
                return NSS_STATUS_TRYAGAIN;
            }
            *groups = larger;
            *size *= 2;
        }
        (*groups)[(*start)++] = more[which];
    }
    return NSS_STATUS_SUCCESS;
}

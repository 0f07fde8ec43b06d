/* LD_PRELOAD: calls with a path in $STALL_FOLDER wait while the file $STALL_FLAG exists, as on a filesystem that does not
   respond. Writes to files that are already open, such as logs, continue: a kernel buffers them.

       cc -shared -fPIC -o stalled_files.so stalled_files.c -ldl */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static void wait_for_path(const char *path) {
    const char *folder = getenv("STALL_FOLDER"), *flag = getenv("STALL_FLAG");
    if (!folder || !flag || !path || strncmp(path, folder, strlen(folder))) return;
    while (syscall(SYS_faccessat, AT_FDCWD, flag, F_OK) == 0) usleep(20000);
}

static void wait_for_file(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length > 0) {
        path[length] = 0;
        wait_for_path(path);
    }
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...) {                                                                       \
        va_list list;                                                                                                  \
        va_start(list, flags);                                                                                         \
        mode_t mode = va_arg(list, mode_t);                                                                            \
        va_end(list);                                                                                                  \
        wait_for_path(path);                                                                                           \
        return REAL(name)(path, flags, mode);                                                                          \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                                                   \
    int name(int at, const char *path, int flags, ...) {                                                               \
        va_list list;                                                                                                  \
        va_start(list, flags);                                                                                         \
        mode_t mode = va_arg(list, mode_t);                                                                            \
        va_end(list);                                                                                                  \
        wait_for_path(path);                                                                                           \
        return REAL(name)(at, path, flags, mode);                                                                      \
    }
OPENAT(openat)
OPENAT(openat64)

#define CALL(name, parameters, path, arguments)                                                                        \
    int name parameters {                                                                                              \
        wait_for_path(path);                                                                                           \
        return REAL(name) arguments;                                                                                   \
    }
CALL(stat, (const char *path, struct stat *found), path, (path, found))
CALL(lstat, (const char *path, struct stat *found), path, (path, found))
CALL(fstatat, (int at, const char *path, struct stat *found, int flags), path, (at, path, found, flags))
CALL(stat64, (const char *path, struct stat64 *found), path, (path, found))
CALL(lstat64, (const char *path, struct stat64 *found), path, (path, found))
CALL(fstatat64, (int at, const char *path, struct stat64 *found, int flags), path, (at, path, found, flags))
CALL(access, (const char *path, int mode), path, (path, mode))
CALL(mkdir, (const char *path, mode_t mode), path, (path, mode))
CALL(rmdir, (const char *path), path, (path))
CALL(unlink, (const char *path), path, (path))
CALL(unlinkat, (int at, const char *path, int flags), path, (at, path, flags))
CALL(rename, (const char *from, const char *to), to, (from, to))
CALL(link, (const char *from, const char *to), to, (from, to))

DIR *opendir(const char *path) {
    wait_for_path(path);
    return REAL(opendir)(path);
}

FILE *fopen(const char *path, const char *mode) {
    wait_for_path(path);
    return REAL(fopen)(path, mode);
}

FILE *fopen64(const char *path, const char *mode) {
    wait_for_path(path);
    return REAL(fopen64)(path, mode);
}

int fsync(int fd) {
    wait_for_file(fd);
    return REAL(fsync)(fd);
}

/* Stands between a process and libc: counts the calls that change files, and at a chosen one kills
   the process or lets the call fail. Also writes down what was done, in order. For LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static long count, at;
static int armed, code, notes = -1;
static char names[4096][512]; /* of open files, by descriptor */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* From here on calls are counted; the at-th (from 1) fails with errno `how`, or kills where 0. */
void fault_arm(long number, int how) { count = 0; at = number; code = how; armed = 1; }
void fault_disarm(void) { armed = 0; }
long fault_count(void) { return count; }
/* Write a line per call to this descriptor; -1 ends it. */
void fault_note(int descriptor) { notes = descriptor; }

static void note(const char *what, const char *one, const char *two) {
    char line[1200];
    if (notes < 0) return;
    int size = snprintf(line, sizeof line, "%s\t%s\t%s\n", what, one, two);
    syscall(SYS_write, notes, line, size);
}

static const char *name_of(int descriptor) {
    return descriptor >= 0 && descriptor < 4096 ? names[descriptor] : "";
}

/* Whether the call must fail. */
static int strikes(void) {
    if (!armed) return 0;
    pthread_mutex_lock(&lock);
    int hit = ++count == at;
    pthread_mutex_unlock(&lock);
    if (hit && code == 0) syscall(SYS_kill, getpid(), SIGKILL);
    if (hit) errno = code;
    return hit;
}

#define REAL(name, type, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static int opened(int descriptor, int folder, const char *path, int flags) {
    if (descriptor < 0 || descriptor >= 4096) return descriptor;
    if (path[0] == '/' || folder < 0)
        snprintf(names[descriptor], 512, "%s", path);
    else {
        char whole[512];
        snprintf(whole, sizeof whole, "%s/%s", names[folder % 4096], path);
        memcpy(names[descriptor], whole, sizeof whole);
    }
    if (flags & O_CREAT) note("create", names[descriptor], "");
    return descriptor;
}

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & O_CREAT) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }

#define OPEN(function) \
    int function(const char *path, int flags, ...) { \
        MODE(flags) \
        REAL(#function, int, const char *, int, ...); \
        if ((flags & O_CREAT) && strikes()) return -1; \
        return opened(real(path, flags, mode), -1, path, flags); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(function) \
    int function(int folder, const char *path, int flags, ...) { \
        MODE(flags) \
        REAL(#function, int, int, const char *, int, ...); \
        if ((flags & O_CREAT) && strikes()) return -1; \
        return opened(real(folder, path, flags, mode), folder, path, flags); \
    }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int descriptor, const void *data, size_t size) {
    REAL("write", ssize_t, int, const void *, size_t);
    if (strikes()) {
        /* A disk that is full has often taken a part. */
        if (size > 1) real(descriptor, data, size / 2);
        errno = code;
        return -1;
    }
    note("write", name_of(descriptor), "");
    return real(descriptor, data, size);
}

int fsync(int descriptor) {
    REAL("fsync", int, int);
    if (strikes()) return -1;
    note("sync", name_of(descriptor), "");
    return real(descriptor);
}

int rename(const char *from, const char *to) {
    REAL("rename", int, const char *, const char *);
    if (strikes()) return -1;
    note("rename", from, to);
    return real(from, to);
}

int mkdir(const char *path, mode_t mode) {
    REAL("mkdir", int, const char *, mode_t);
    if (strikes()) return -1;
    note("mkdir", path, "");
    return real(path, mode);
}

int unlink(const char *path) {
    REAL("unlink", int, const char *);
    if (strikes()) return -1;
    note("unlink", path, "");
    return real(path);
}

int rmdir(const char *path) {
    REAL("rmdir", int, const char *);
    if (strikes()) return -1;
    note("rmdir", path, "");
    return real(path);
}

int unlinkat(int folder, const char *path, int flags) {
    REAL("unlinkat", int, int, const char *, int);
    char whole[1100];
    if (strikes()) return -1;
    snprintf(whole, sizeof whole, "%s/%s", name_of(folder), path);
    note("unlink", folder < 0 ? path : whole, "");
    return real(folder, path, flags);
}

/* A read-only mount of a folder that is far away: each open waits, and all reads share a bandwidth.
 *
 * mount FOLDER MOUNT_POINT OPEN_SECONDS BYTES_PER_SECOND     runs until it is unmounted
 * cc -O2 mount.c -o mount $(pkg-config --cflags --libs fuse3)
 */
#define FUSE_USE_VERSION 312
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 300 }; /* so many opens can wait at a time */

static char folder[PATH_MAX];
static double open_seconds, bytes_per_second;
static double pipe_free; /* when the bytes that were asked for so far have come through */
static pthread_mutex_t pipe_lock = PTHREAD_MUTEX_INITIALIZER;

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec * 1e-9;
}

static void wait_seconds(double seconds) {
    if (seconds <= 0) return;
    struct timespec pause = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    nanosleep(&pause, NULL);
}

static int there(char *full, const char *path) {
    return snprintf(full, PATH_MAX, "%s%s", folder, path) < PATH_MAX ? 0 : -ENAMETOOLONG;
}

static int slow_getattr(const char *path, struct stat *found, struct fuse_file_info *file) {
    char full[PATH_MAX];
    if (file) return fstat(file->fh, found) ? -errno : 0;
    int refused = there(full, path);
    return refused ? refused : lstat(full, found) ? -errno : 0;
}

static int slow_open(const char *path, struct fuse_file_info *file) {
    char full[PATH_MAX];
    int refused = there(full, path);
    if (refused) return refused;
    if ((file->flags & O_ACCMODE) != O_RDONLY) return -EROFS;
    wait_seconds(open_seconds);
    int opened = open(full, O_RDONLY);
    if (opened < 0) return -errno;
    file->fh = opened;
    return 0;
}

static int slow_read(const char *path, char *bytes, size_t size, off_t from, struct fuse_file_info *file) {
    (void)path;
    ssize_t came = pread(file->fh, bytes, size, from);
    if (came < 0) return -errno;
    pthread_mutex_lock(&pipe_lock);
    double at = now();
    if (pipe_free < at) pipe_free = at;
    pipe_free += came / bytes_per_second;
    double until = pipe_free;
    pthread_mutex_unlock(&pipe_lock);
    wait_seconds(until - at);
    return came;
}

static int slow_release(const char *path, struct fuse_file_info *file) {
    (void)path;
    close(file->fh);
    return 0;
}

static int slow_readdir(const char *path, void *names, fuse_fill_dir_t add, off_t from, struct fuse_file_info *file,
                        enum fuse_readdir_flags flags) {
    (void)from, (void)file, (void)flags;
    char full[PATH_MAX];
    int refused = there(full, path);
    if (refused) return refused;
    DIR *opened = opendir(full);
    if (!opened) return -errno;
    wait_seconds(open_seconds);
    for (struct dirent *entry; (entry = readdir(opened));)
        if (add(names, entry->d_name, NULL, 0, 0)) break;
    closedir(opened);
    return 0;
}

static void *nothing_kept(struct fuse_conn_info *connection, struct fuse_config *config) {
    (void)connection;
    config->kernel_cache = config->auto_cache = 0; /* each open reads anew, as from a store */
    return NULL;
}

static const struct fuse_operations operations = {
    .init = nothing_kept, .getattr = slow_getattr, .open = slow_open, .read = slow_read,
    .release = slow_release, .readdir = slow_readdir,
};

int main(int count, char **told) {
    if (count != 5 || !realpath(told[1], folder)) {
        fprintf(stderr, "usage: mount FOLDER MOUNT_POINT OPEN_SECONDS BYTES_PER_SECOND\n");
        return 2;
    }
    open_seconds = atof(told[3]), bytes_per_second = atof(told[4]);
    char *options[] = {told[0], "-o", "ro,fsname=slow", NULL};
    struct fuse_args arguments = FUSE_ARGS_INIT(3, options);
    struct fuse *mounted = fuse_new(&arguments, &operations, sizeof operations, NULL);
    if (!mounted || fuse_mount(mounted, told[2])) return 1;
    fuse_set_signal_handlers(fuse_get_session(mounted));
    struct fuse_loop_config *loop = fuse_loop_cfg_create();
    fuse_loop_cfg_set_max_threads(loop, THREADS);
    fuse_loop_cfg_set_idle_threads(loop, THREADS);
    int ended = fuse_loop_mt(mounted, loop);
    fuse_loop_cfg_destroy(loop);
    fuse_unmount(mounted);
    return ended < 0;
}

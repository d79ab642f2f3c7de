"""The system calls that jobs may make, by name and number. A program of another architecture is killed.

They are what compilers, Python, PyTorch, Triton and CUDA use: files, memory, processes of their own, threads, time.
Whatever a kernel adds is not among them. The numbers are Linux' own (asm/unistd_64.h).
"""

from __future__ import annotations

NEWEST = 462
"""Calls with higher numbers came after this list was made."""

_FILES = """
    read 0, write 1, open 2, openat 257, openat2 437, creat 85, close 3, close_range 436, stat 4, fstat 5,
    lstat 6, newfstatat 262, statx 332, statfs 137, fstatfs 138, access 21, faccessat 269, faccessat2 439,
    lseek 8, pread64 17, pwrite64 18, readv 19, writev 20, preadv 295, pwritev 296, preadv2 327,
    pwritev2 328, getdents 78, getdents64 217, getcwd 79, chdir 80, fchdir 81, mkdir 83, mkdirat 258,
    rmdir 84, rename 82, renameat 264, renameat2 316, link 86, linkat 265, unlink 87, unlinkat 263,
    symlink 88, symlinkat 266, readlink 89, readlinkat 267, mknod 133, mknodat 259, chmod 90, fchmod 91,
    fchmodat 268, fchmodat2 452, chown 92, fchown 93, lchown 94, fchownat 260, umask 95, utime 132,
    utimes 235, utimensat 280, futimesat 261, truncate 76, ftruncate 77, fallocate 285, flock 73,
    fcntl 72, fsync 74, fdatasync 75, sync 162, syncfs 306, sync_file_range 277, sendfile 40,
    copy_file_range 326, splice 275, tee 276, vmsplice 278, fadvise64 221, readahead 187, getxattr 191,
    lgetxattr 192, fgetxattr 193, listxattr 194, llistxattr 195, flistxattr 196, setxattr 188,
    lsetxattr 189, fsetxattr 190, removexattr 197, lremovexattr 198, fremovexattr 199, ioctl 16, dup 32,
    dup2 33, dup3 292, pipe 22, pipe2 293, inotify_init 253, inotify_init1 294, inotify_add_watch 254,
    inotify_rm_watch 255, memfd_create 319
"""
_WAITING = """
    poll 7, ppoll 271, select 23, pselect6 270, epoll_create 213, epoll_create1 291, epoll_ctl 233,
    epoll_wait 232, epoll_pwait 281, epoll_pwait2 441, eventfd 284, eventfd2 290, signalfd 282,
    signalfd4 289, timerfd_create 283, timerfd_settime 286, timerfd_gettime 287, futex 202,
    futex_waitv 449, futex_wake 454, futex_wait 455, futex_requeue 456, get_robust_list 274,
    set_robust_list 273
"""
_MEMORY = """
    mmap 9, munmap 11, mremap 25, mprotect 10, msync 26, mincore 27, madvise 28, brk 12, mlock 149,
    mlock2 325, munlock 150, mlockall 151, munlockall 152, mbind 237, get_mempolicy 239,
    set_mempolicy 238, move_pages 279, membarrier 324, pkey_alloc 330, pkey_free 331, pkey_mprotect 329,
    map_shadow_stack 453, mseal 462
"""
_PROCESSES = """
    fork 57, vfork 58, execve 59, execveat 322, exit 60, exit_group 231, wait4 61, waitid 247, kill 62,
    tkill 200, tgkill 234, getpid 39, getppid 110, gettid 186, getpgrp 111, getpgid 121, setpgid 109,
    getsid 124, setsid 112, set_tid_address 218, rseq 334, arch_prctl 158, prctl 157, getuid 102,
    geteuid 107, getgid 104, getegid 108, getgroups 115, getresuid 118, getresgid 120, setuid 105,
    setgid 106, setreuid 113, setregid 114, setresuid 117, setresgid 119, capget 125, getrlimit 97,
    setrlimit 160, getrusage 98, times 100, sysinfo 99, uname 63, getcpu 309, getpriority 140,
    setpriority 141, ioprio_get 252, ioprio_set 251, sched_yield 24, sched_getaffinity 204,
    sched_setaffinity 203, sched_getparam 143, sched_setparam 142, sched_getscheduler 145,
    sched_setscheduler 144, sched_getattr 315, sched_setattr 314, sched_get_priority_max 146,
    sched_get_priority_min 147, sched_rr_get_interval 148, restart_syscall 219, getrandom 318
"""
_TIME = """
    rt_sigaction 13, rt_sigprocmask 14, rt_sigreturn 15, rt_sigpending 127, rt_sigsuspend 130,
    rt_sigtimedwait 128, sigaltstack 131, pause 34, alarm 37, getitimer 36, setitimer 38,
    timer_create 222, timer_settime 223, timer_gettime 224, timer_getoverrun 225, timer_delete 226,
    nanosleep 35, clock_nanosleep 230, clock_gettime 228, clock_getres 229, gettimeofday 96, time 201
"""
_SOCKETS = """
    bind 49, listen 50, accept 43, accept4 288, getsockname 51, getpeername 52, getsockopt 55,
    setsockopt 54, sendto 44, sendmsg 46, sendmmsg 307, recvfrom 45, recvmsg 47, recvmmsg 299, shutdown 48
"""
_SHARED_MEMORY = """
    shmget 29, shmat 30, shmctl 31, shmdt 67, semget 64, semop 65, semtimedop 220, semctl 66, msgget 68,
    msgsnd 69, msgrcv 70, msgctl 71, mq_open 240, mq_unlink 241, mq_timedsend 242, mq_timedreceive 243,
    mq_notify 244, mq_getsetattr 245
"""


def _numbers(*lists: str) -> frozenset[int]:
    return frozenset(int(call.split()[1]) for listed in lists for call in listed.split(","))


ALLOWED = _numbers(_FILES, _WAITING, _MEMORY, _PROCESSES, _TIME, _SOCKETS)
"""None of them makes or connects a socket: seccomp.py says which may."""
SHARED_MEMORY = _numbers(_SHARED_MEMORY)
"""System V's shared memory, semaphores and queues, and POSIX' queues."""

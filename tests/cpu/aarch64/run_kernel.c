/* Runs one kernel, `void KERNEL(char *block)`, that is linked in:  run_kernel FILE FIRST COUNT THREADS

FILE holds the argument block and, behind it, everything that the block points to. The block's COUNT words from
FIRST on are pointers, given as offsets into FILE; 0 is none. What the kernel writes is in FILE afterwards. */
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>

void KERNEL(char *block);

static void *work(void *block) {
    KERNEL(block);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 5) return 1;
    int file = open(argv[1], O_RDWR), first = atoi(argv[2]), count = atoi(argv[3]), threads = atoi(argv[4]);
    struct stat status;
    if (file < 0 || fstat(file, &status)) return 2;
    int64_t *block = mmap(NULL, status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (block == MAP_FAILED || threads < 1 || threads > 64) return 3;
    for (int i = first; i < first + count; i++)
        if (block[i]) block[i] += (int64_t)block;
    pthread_t others[64];
    for (int t = 1; t < threads; t++)
        if (pthread_create(&others[t], NULL, work, block)) return 4;
    work(block);
    for (int t = 1; t < threads; t++) pthread_join(others[t], NULL);
    return 0;
}

/*
 * Makes a file as HAMi-core does, by a layout of its own: <path> <uuids, by comma> <priority> <last kernel>, and for each process
 * <status>:<bytes of contexts>:<of programs>:<of buffers>:<all>:<percent> on its GPU of the same number, round and round.
 * `-` as uuids leaves them empty. Given `show` in place of uuids, it prints what the library would read of it.
 * MINOR is the minor version; with V2_8_1 the layout is that of HAMi v2.8.1.
 */
#include <fcntl.h>
#include <semaphore.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { GPUS = 16, SLOTS = 1024 };

struct memory { uint64_t contexts, programs, buffers, offset, all, spare[3]; };
struct percent { uint64_t decoder, encoder, kernels, spare[3]; };

struct process {
    int32_t inside, outside;
#ifdef V2_8_1
    uint64_t sequence;
#endif
    struct memory memory[GPUS];
    uint64_t seen[GPUS];
    struct percent percent[GPUS];
    int32_t status;
#ifdef V2_8_1
    uint64_t spare[2];
#else
    uint64_t sequence, spare[2];
#endif
};

struct region {
    int32_t magic;
    uint32_t major, minor;
    int32_t flag;
    size_t owner;
    sem_t lock;
#ifdef V2_8_1
    sem_t start;
#endif
    uint64_t gpus;
    char uuid[GPUS][96];
    uint64_t memory_limit[GPUS], core_limit[GPUS];
    struct process process[SLOTS];
    int processes, limits_cores, recent_kernel, priority;
    uint64_t last_kernel;
#ifdef V2_8_1
    uint64_t spare[4];
#else
    sem_t start;
#endif
};

int main(int count, char **words) {
    int file = open(words[1], O_RDWR | O_CREAT, 0666), place;
    struct region *region;
    char *uuid;
    if (count < 3 || file < 0 || lseek(file, sizeof *region, SEEK_SET) < 0)
        return 1;
    if (strcmp(words[2], "show") && write(file, "", 1) != 1)
        return 1;
    region = mmap(NULL, sizeof *region, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (region == MAP_FAILED)
        return 1;
    if (!strcmp(words[2], "show")) {
        printf("%d %d %d\n", region->recent_kernel, region->limits_cores, region->priority);
        return 0;
    }
    region->major = 1;
    region->minor = MINOR;
    for (uuid = strtok(words[2], ","); uuid; uuid = strtok(NULL, ","), region->gpus++)
        snprintf(region->uuid[region->gpus], sizeof *region->uuid, "%s", strcmp(uuid, "-") ? uuid : "");
    for (place = 0; place < GPUS; place++)
        region->core_limit[place] = 30;
    region->limits_cores = 1;
    region->recent_kernel = 2;
    region->priority = atoi(words[3]);
    region->last_kernel = strtoull(words[4], NULL, 10);
    for (place = 0; place + 5 < count; place++) {
        struct process *each = &region->process[place];
        int gpu = region->gpus ? place % (int)region->gpus : 0;
        struct memory *memory = &each->memory[gpu];
        each->inside = each->outside = place + 1;
        if (sscanf(words[place + 5], "%d:%lu:%lu:%lu:%lu:%lu", &each->status, &memory->contexts, &memory->programs,
                   &memory->buffers, &memory->all, &each->percent[gpu].kernels) != 6)
            return 1;
        region->processes++;
    }
    region->magic = 19920718;
    return 0;
}

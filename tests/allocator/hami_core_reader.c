/* Reads the limits in its environment as HAMi-core does, and prints for each of its 16 GPUs: <bytes>/<cores>; 0 is none. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static unsigned long amount(const char *name) {
    const char *text = getenv(name);
    unsigned long unit = 1, number;
    if (!text || !*text)
        return 0;
    switch (text[strlen(text) - 1] | 0x20) {
    case 'g':
        unit <<= 10; /* fall through */
    case 'm':
        unit <<= 10; /* fall through */
    case 'k':
        unit <<= 10;
    }
    number = strtoul(text, NULL, 0);
    return number * unit / unit == number ? number * unit : 0;
}

static unsigned long limit(const char *name, int gpu) {
    char own[32];
    unsigned long found;
    snprintf(own, sizeof own, "%s_%d", name, gpu);
    found = amount(own);
    return found ? found : amount(name);
}

int main(void) {
    int gpu;
    for (gpu = 0; gpu < 16; gpu++) {
        unsigned long cores = limit("CUDA_DEVICE_SM_LIMIT", gpu);
        printf("%lu/%lu ", limit("CUDA_DEVICE_MEMORY_LIMIT", gpu), cores < 100 ? cores : 0);
    }
    return 0;
}

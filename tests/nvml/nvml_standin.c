/*
 * A stand-in for NVIDIA's libnvidia-ml.so.1: plays a machine, and its faults, that a script describes.
 *
 * The script comes through standin_play, or from the file that $NVML_STANDIN names. One statement a line, `#` begins a comment:
 *
 *   gpu uuid=GPU-0 pci=00000000:07:00.0 minor=0 name=NVIDIA_H100 memory=85899345920 cpus=ff nodes=1 own=8 mig=1
 *   gpu uuid=GPU-9 capability=70                      compute capability 7.0; otherwise 9.0
 *   link 0 3 gpu 1 | switch | npu | unknown | down    link 3 of GPU 0 leads to GPU 1, an NVSwitch, ...
 *   level 0 1 10                                      common PCIe ancestor of GPUs 0 and 1; otherwise 50
 *   field 0 230 1                                     field 230 of GPU 0 is 1; fields not named are not supported
 *   lost 0 230                                        asked for field 230, GPU 0 is lost
 *   fabric 0 4 3 0 00112233445566778899aabbccddeeff 1 clique, state, status, cluster and, unless 0, health of GPU 0
 *   mig 0 gi=1 ci=0 uuid=MIG-0 name=MIG_1g.10gb memory=9728 slices=1 compute=1     memory in MiB
 *   profile 0 id=19 kind=0 name=MIG_1g.10gb memory=9728 slices=1 sms=16 at=0:1,1:1     of instances of GPU 0, by NVML's number
 *                                                     of it (`kind`); `at` is start:size; `place=0:1` of an instance where it is
 *   fail nvmlDeviceGetName 2 15                       answers 15 (GPU is lost) for GPU 2, or for all with `*`
 *   hang nvmlDeviceGetName                            does not answer until standin_release
 *   use 0 21474836480 97 30                           bytes in use, percent of time busy of GPU 0 and of its memory; otherwise 0, not told, 0
 *   process 0 pid=41 memory=1073741824 kind=graphics sm=40 at=5 mig=1     of GPU 0, here of its second instance; kind is compute
 *                                                     unless said; without memory or sm that is not told; sm as sampled at 5 us
 *   gpu uuid=GPU-9 late=1                             is seen once NVML was closed by all and opened anew
 *   delay 100                                         microseconds, of each call
 *   hurry 100                                         a wait for events ends after a hundredth of its time
 *
 * Instances that are made and destroyed outlive the process in the file that $NVML_STANDIN_KEPT names, as they do in a driver: its
 * `mig` statements are played after the script.
 *
 * A GPU keeps its handle from script to script by its uuid. Events come through standin_event, one for each set in which their
 * GPU is registered for their kind at that time, and go with the set; a wait ends early when another script is played.
 *
 * `_` in names stands for a blank. Built with -DOLD_DRIVER it lacks what old drivers lack. Layouts: nvml.h of CUDA 13.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, GPU_IS_LOST = 15, IN_USE = 19, INSUFFICIENT_RESOURCES = 23 };
enum { PROCESSES = 256 };
enum { PROFILES = 18, PLACES = 16 };
enum { GPUS = 32, LINKS = 36, FIELDS = 8, MIGS = 8, RULES = 64, CALLS = 64, KNOWN = 128, SETS = 64, QUEUE = 1024 };
enum { KINDS = 0xC10B }; /* of events: XID, both ECC, MIG change, unavailable, recovery action */

typedef struct { char kind[8]; int peer; } Link;
typedef struct { unsigned id, ret; uint64_t value; } Field;
typedef struct { int pid, sm, gpu, mig; unsigned long long memory, at; char kind[16]; } Process;
typedef struct { unsigned start, size; } Placement;
typedef struct { int used, id, slices, sms, places; unsigned long long memory; char name[96]; Placement at[PLACES]; } Profile;
typedef struct Device {
    struct Device *parent; /* of a MIG instance */
    int index, minor, own, late, mig_mode, fields, migs, fabric, clique, state, status, health, gi, ci, slices, compute, capability, mode;
    char uuid[96], pci[32], name[96];
    unsigned long long memory, cpus, nodes, used;
    int slot, busy, busy_memory; /* of an instance its place on the GPU, and -1 of a GPU; percent */
    Profile profile[PROFILES];
    Placement place;
    int of_profile; /* of an instance: NVML's id of its profile */
    unsigned char cluster[16];
    Link links[LINKS];
    Field field[FIELDS];
    struct Device *mig[MIGS];
} Device;
typedef struct { char function[64]; int gpu, code, hangs; } Rule;
typedef struct { char function[64]; int count; } Calls;
typedef struct { Device *device; unsigned long long kind, data; unsigned gi, ci; } EventData;
typedef struct { int used; Device *device[GPUS]; unsigned long long kinds[GPUS]; } EventSet;
typedef struct { EventSet *set; EventData data; } Waiting;

static Device *gpus[GPUS], *known[KNOWN];
static int gpu_count, known_count, levels[GPUS][GPUS], rule_count, open_count, call_count, delay, hurry = 1;
static int event_count, plays;
static EventSet sets[SETS];
static Waiting queue[QUEUE];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of calls, sets and queue: two threads of a process come here */
static Process processes[PROCESSES];
static int process_count;
static Rule rules[RULES];
static Calls calls[CALLS];
static volatile int released;
static int hanging, waiting; /* threads in a call that hangs, and that wait for an event */

/* The script. */

static void set(Device *d, const char *key, const char *value) {
    unsigned long long number = strtoull(value, NULL, !strcmp(key, "cpus") || !strcmp(key, "nodes") ? 16 : 10);
    if (!strcmp(key, "uuid")) snprintf(d->uuid, sizeof d->uuid, "%s", value);
    if (!strcmp(key, "pci")) snprintf(d->pci, sizeof d->pci, "%s", value);
    if (!strcmp(key, "name")) {
        snprintf(d->name, sizeof d->name, "%s", value);
        for (char *c = d->name; *c; c++) if (*c == '_') *c = ' ';
    }
    if (!strcmp(key, "memory")) d->memory = number;
    if (!strcmp(key, "cpus")) d->cpus = number;
    if (!strcmp(key, "nodes")) d->nodes = number;
    if (!strcmp(key, "minor")) d->minor = (int)number;
    if (!strcmp(key, "own")) d->own = (int)number;
    if (!strcmp(key, "late")) d->late = (int)number;
    if (!strcmp(key, "mig")) d->mig_mode = (int)number;
    if (!strcmp(key, "gi")) d->gi = (int)number;
    if (!strcmp(key, "ci")) d->ci = (int)number;
    if (!strcmp(key, "slices")) d->slices = (int)number;
    if (!strcmp(key, "capability")) d->capability = (int)number;
    if (!strcmp(key, "compute")) d->compute = (int)number;
    if (!strcmp(key, "profile")) d->of_profile = (int)number;
    if (!strcmp(key, "place")) sscanf(value, "%u:%u", &d->place.start, &d->place.size);
}

static Device *device_of(char **rest) {
    Device *d = calloc(1, sizeof *d);
    d->minor = d->own = d->slot = d->busy = -1, d->capability = 90;
    for (char *word; (word = strtok_r(NULL, " \t", rest));) {
        char *equals = strchr(word, '=');
        if (equals) *equals = 0, set(d, word, equals + 1);
    }
    return d;
}

static void profile_of(Device *gpu, char **rest) {
    Profile p = {.used = 1};
    int kind = 0;
    char at[256] = "", *more;
    for (char *word; (word = strtok_r(NULL, " \t", rest));) {
        if (sscanf(word, "id=%d", &p.id) || sscanf(word, "kind=%d", &kind) || sscanf(word, "memory=%llu", &p.memory)) continue;
        if (sscanf(word, "slices=%d", &p.slices) || sscanf(word, "sms=%d", &p.sms) || sscanf(word, "at=%255s", at)) continue;
        sscanf(word, "name=%95s", p.name);
    }
    for (char *c = p.name; *c; c++) if (*c == '_') *c = ' ';
    for (char *word = strtok_r(at, ",", &more); word && p.places < PLACES; word = strtok_r(NULL, ",", &more))
        sscanf(word, "%u:%u", &p.at[p.places].start, &p.at[p.places].size), p.places++;
    gpu->profile[kind % PROFILES] = p;
}

static Process process_of(int gpu, char **rest) {
    Process p = {.gpu = gpu, .mig = -1, .sm = -1, .memory = ~0ull, .at = ~0ull, .kind = "compute"};
    for (char *word; (word = strtok_r(NULL, " \t", rest));) {
        if (sscanf(word, "pid=%d", &p.pid) || sscanf(word, "sm=%d", &p.sm) || sscanf(word, "mig=%d", &p.mig)) continue;
        if (sscanf(word, "memory=%llu", &p.memory) || sscanf(word, "at=%llu", &p.at)) continue;
        sscanf(word, "kind=%15s", p.kind);
    }
    return p;
}

static Device *known_as(Device *d) {
    for (int i = 0; i < gpu_count; i++) if (!strcmp(gpus[i]->uuid, d->uuid)) return d; /* two with one uuid */
    for (int i = 0; i < known_count; i++)
        if (!strcmp(known[i]->uuid, d->uuid)) { *known[i] = *d; free(d); return known[i]; }
    return known_count < KNOWN ? known[known_count++] = d : d;
}

static void statement(char *line) {
    char *rest, *verb = strtok_r(line, " \t", &rest), kind[8] = "", function[64] = "", gpu[8] = "", hex[33] = "";
    int a = 0, b = -1, c = 0, d = 0, e = 0;
    unsigned long long bytes = 0;
    if (!verb || *verb == '#') return;
    if (!strcmp(verb, "gpu")) {
        Device *device = known_as(device_of(&rest));
        device->index = gpu_count;
        gpus[gpu_count++] = device;
    } else if (!strcmp(verb, "mig")) {
        Device *parent = gpus[atoi(strtok_r(NULL, " \t", &rest))], *instance = device_of(&rest);
        instance->parent = parent, instance->index = parent->index, instance->slot = parent->migs;
        parent->mig[parent->migs++] = instance;
    } else if (!strcmp(verb, "profile")) {
        Device *of = gpus[atoi(strtok_r(NULL, " \t", &rest))];
        profile_of(of, &rest);
    } else if (!strcmp(verb, "link") && sscanf(rest, "%d %d %7s %d", &a, &c, kind, &b) >= 3) {
        memcpy(gpus[a]->links[c].kind, kind, sizeof kind);
        gpus[a]->links[c].peer = b;
    } else if (!strcmp(verb, "level") && sscanf(rest, "%d %d %d", &a, &b, &c) == 3) {
        levels[a][b] = levels[b][a] = c;
    } else if (!strcmp(verb, "field") && sscanf(rest, "%d %d %d", &a, &b, &c) == 3) {
        gpus[a]->field[gpus[a]->fields++] = (Field){(unsigned)b, OK, (uint64_t)c};
    } else if (!strcmp(verb, "lost") && sscanf(rest, "%d %d", &a, &b) == 2) {
        gpus[a]->field[gpus[a]->fields++] = (Field){(unsigned)b, GPU_IS_LOST, 0};
    } else if (!strcmp(verb, "use") && sscanf(rest, "%d %llu %d %d", &a, &bytes, &b, &c) >= 2) {
        gpus[a]->used = bytes, gpus[a]->busy = b, gpus[a]->busy_memory = c;
    } else if (!strcmp(verb, "process") && process_count < PROCESSES) {
        processes[process_count++] = process_of(atoi(strtok_r(NULL, " \t", &rest)), &rest);
    } else if (!strcmp(verb, "fabric") && sscanf(rest, "%d %d %d %d %32s %d", &a, &b, &c, &d, hex, &e) >= 5) {
        gpus[a]->fabric = 1, gpus[a]->clique = b, gpus[a]->state = c, gpus[a]->status = d, gpus[a]->health = e;
        for (int i = 0; i < 16; i++) sscanf(hex + 2 * i, "%2hhx", &gpus[a]->cluster[i]);
    } else if (!strcmp(verb, "fail") && sscanf(rest, "%63s %7s %d", function, gpu, &c) == 3) {
        Rule *rule = &rules[rule_count++];
        *rule = (Rule){.gpu = *gpu == '*' ? -1 : atoi(gpu), .code = c};
        memcpy(rule->function, function, sizeof function);
    } else if (!strcmp(verb, "hang") && sscanf(rest, "%63s", function) == 1) {
        Rule *rule = &rules[rule_count++];
        *rule = (Rule){.gpu = -1, .hangs = 1};
        memcpy(rule->function, function, sizeof function);
    } else if (!strcmp(verb, "delay") && sscanf(rest, "%d", &delay) == 1) {
    } else if (!strcmp(verb, "hurry") && sscanf(rest, "%d", &hurry) == 1 && hurry > 0) {
    } else {
        fprintf(stderr, "nvml_standin: cannot play %s\n", verb);
        abort();
    }
}

void standin_play(const char *script) {
    char *text = strdup(script), *rest;
    gpu_count = rule_count = process_count = delay = released = 0, hurry = 1, plays++;
    for (int i = 0; i < GPUS * GPUS; i++) levels[i / GPUS][i % GPUS] = 50;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) statement(line);
    free(text);
}

void standin_release(void) { released = 1; }

int standin_calls(const char *function) {
    for (int i = 0; i < call_count; i++) if (!strcmp(calls[i].function, function)) return calls[i].count;
    return 0;
}

int standin_made(int gpu) { return gpus[gpu]->migs; }

int standin_hanging(void) { return __atomic_load_n(&hanging, __ATOMIC_SEQ_CST); }

int standin_waiting(void) { return __atomic_load_n(&waiting, __ATOMIC_SEQ_CST); }

static void add(int *threads, int by) { __atomic_add_fetch(threads, by, __ATOMIC_SEQ_CST); }

/* What every call begins with: count it, be as slow, dead or wrong as the script says. */

static int enter(const char *function, Device *device) {
    int i = 0, code = OK;
    pthread_mutex_lock(&lock);
    while (i < call_count && strcmp(calls[i].function, function)) i++;
    if (i == call_count) snprintf(calls[call_count++].function, sizeof calls[0].function, "%s", function);
    calls[i].count++;
    pthread_mutex_unlock(&lock);
    if (delay) usleep((useconds_t)delay);
    for (Rule *rule = rules; rule < rules + rule_count; rule++) {
        if (strcmp(rule->function, function) || (rule->gpu >= 0 && (!device || rule->gpu != device->index))) continue;
        if (rule->hangs) {
            add(&hanging, 1);
            while (rule->hangs && !released) usleep(1000);
            add(&hanging, -1);
        }
        code = rule->code;
    }
    return code == OK && !open_count && strncmp(function, "nvmlInit", 8) ? UNINITIALIZED : code;
}

#define ENTER(device) do { int code_ = enter(__func__, device); if (code_ != OK) return code_; } while (0)

static int init(void) {
    pthread_mutex_lock(&lock); /* several threads of an agent open NVML */
    const char *path = getenv("NVML_STANDIN");
    if (path && !gpu_count) {
        static char script[1 << 16];
        const char *paths[] = {path, getenv("NVML_STANDIN_KEPT")};
        size_t length = 0;
        for (int i = 0; i < 2 && paths[i]; i++) {
            FILE *file = fopen(paths[i], "r");
            if (!file) continue;
            length += fread(script + length, 1, sizeof script - 2 - length, file);
            script[length++] = '\n', fclose(file);
        }
        script[length] = 0;
        if (length) standin_play(script);
    }
    if (!open_count++) for (int i = 0; i < gpu_count; i++) gpus[i]->late = 0;
    pthread_mutex_unlock(&lock);
    return OK;
}

static unsigned visible(void) {
    unsigned count = 0;
    while (count < (unsigned)gpu_count && !gpus[count]->late) count++;
    return count;
}

void standin_event(int gpu, unsigned long long kind, unsigned long long data, unsigned gi, unsigned ci) {
    pthread_mutex_lock(&lock);
    for (EventSet *set = sets; set < sets + SETS; set++)
        for (int g = 0; g < GPUS && set->used; g++)
            if (set->device[g] == gpus[gpu] && set->kinds[g] & kind && event_count < QUEUE)
                queue[event_count++] = (Waiting){set, {gpus[gpu], kind, data, gi, ci}};
    pthread_mutex_unlock(&lock);
}

int standin_listened(int gpu) {
    int found = 0;
    for (EventSet *set = sets; set < sets + SETS; set++)
        for (int g = 0; g < GPUS; g++) found |= set->used && set->device[g] == gpus[gpu];
    return found;
}

/* NVML. */

typedef struct { char legacy[16]; unsigned domain, bus, device, pciDeviceId, pciSubSystemId; char busId[32]; } PciInfo;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Rates;
typedef struct { unsigned pid; unsigned long long memory; unsigned gi, ci; } ProcessInfo;
typedef struct { unsigned pid; unsigned long long at; unsigned sm, memory, encoder, decoder; } Sample;
typedef struct { unsigned fieldId, scopeId; int64_t timestamp, latency; unsigned type, ret; union { uint64_t ull; unsigned ui; } value; } FieldValue;
typedef struct { unsigned char cluster[16]; unsigned status, clique, state; } FabricInfo;
typedef struct { unsigned version; unsigned char cluster[16]; unsigned status, clique, state, health; } FabricInfoV2;
typedef struct { unsigned sm, copy, decoder, encoder, jpeg, ofa, gpuSlices, computeSlices; unsigned long long memory; } Attributes;

int nvmlInit_v2(void) { ENTER(NULL); return init(); }
int nvmlInit(void) { ENTER(NULL); return init(); }
int nvmlInitWithFlags(unsigned flags) { (void)flags; ENTER(NULL); return init(); }
int nvmlShutdown(void) {
    ENTER(NULL);
    pthread_mutex_lock(&lock);
    if (!--open_count) memset(sets, 0, sizeof sets), event_count = 0;
    pthread_mutex_unlock(&lock);
    return OK;
}
const char *nvmlErrorString(int code) { (void)code; return "stand-in error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) { ENTER(NULL); snprintf(text, length, "999.0"); return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { ENTER(NULL); *count = visible(); return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **d) {
    ENTER(index < visible() ? gpus[index] : NULL);
    if (index >= visible()) return INVALID_ARGUMENT;
    *d = gpus[index];
    return OK;
}
int nvmlDeviceGetUUID(Device *d, char *text, unsigned length) { ENTER(d); snprintf(text, length, "%s", d->uuid); return OK; }
int nvmlDeviceGetName(Device *d, char *text, unsigned length) { ENTER(d); snprintf(text, length, "%s", d->name); return OK; }
int nvmlDeviceGetIndex(Device *d, unsigned *index) { ENTER(d); *index = (unsigned)d->index; return OK; }
int nvmlDeviceGetMinorNumber(Device *d, unsigned *minor) {
    ENTER(d);
    *minor = (unsigned)d->minor;
    return d->minor < 0 ? NOT_SUPPORTED : OK;
}
int nvmlDeviceGetPciInfo_v3(Device *d, PciInfo *info) {
    ENTER(d);
    memset(info, 0, sizeof *info);
    snprintf(info->busId, sizeof info->busId, "%s", d->pci);
    return OK;
}
int nvmlDeviceGetMemoryInfo(Device *d, Memory *memory) {
    ENTER(d);
    unsigned long long total = d->parent ? d->memory << 20 : d->memory; /* of an instance the script has MiB */
    *memory = (Memory){total, total - d->used, d->used};
    return d->memory ? OK : NOT_SUPPORTED;
}
int nvmlDeviceGetUtilizationRates(Device *d, Rates *rates) {
    ENTER(d);
    if (d->busy < 0 || d->mig_mode) return NOT_SUPPORTED;
    *rates = (Rates){(unsigned)d->busy, (unsigned)d->busy_memory};
    return OK;
}

static int listed(Device *d, const char *kind, unsigned *count, ProcessInfo *infos) {
    unsigned found = 0, room = *count;
    for (Process *p = processes; p < processes + process_count; p++) {
        if (p->gpu != d->index || strcmp(p->kind, kind) || (d->slot >= 0 && p->mig != d->slot)) continue;
        Device *of = p->mig >= 0 ? gpus[p->gpu]->mig[p->mig] : NULL;
        if (infos && found < room)
            infos[found] = (ProcessInfo){(unsigned)p->pid, p->memory, of ? (unsigned)of->gi : ~0u, of ? (unsigned)of->ci : ~0u};
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : OK;
}

int nvmlDeviceGetComputeRunningProcesses_v2(Device *d, unsigned *n, ProcessInfo *i) { ENTER(d); return listed(d, "compute", n, i); }
int nvmlDeviceGetGraphicsRunningProcesses_v2(Device *d, unsigned *n, ProcessInfo *i) { ENTER(d); return listed(d, "graphics", n, i); }

int nvmlDeviceGetCudaComputeCapability(Device *d, int *major, int *minor) {
    ENTER(d);
    *major = d->capability / 10, *minor = d->capability % 10;
    return OK;
}
int nvmlDeviceGetComputeMode(Device *d, unsigned *mode) { ENTER(d); *mode = (unsigned)d->mode; return OK; }
int nvmlDeviceSetComputeMode(Device *d, unsigned mode) {
    const char *events = getenv("NVML_STANDIN_EVENTS"); /* a file that is told of each change */
    ENTER(d);
    d->mode = (int)mode;
    FILE *file = events ? fopen(events, "a") : NULL;
    if (file) fprintf(file, "%s %u\n", d->uuid, mode), fclose(file);
    return OK;
}
int nvmlDeviceGetCpuAffinity(Device *d, unsigned words, unsigned long *mask) {
    ENTER(d);
    memset(mask, 0, words * sizeof *mask);
    mask[0] = d->cpus;
    return d->cpus ? OK : NOT_SUPPORTED;
}
int nvmlDeviceGetTopologyCommonAncestor(Device *a, Device *b, int *level) {
    ENTER(a);
    *level = levels[a->index][b->index];
    return OK;
}
int nvmlDeviceGetNvLinkState(Device *d, unsigned link, unsigned *active) {
    ENTER(d);
    if (link >= LINKS || !*d->links[link].kind) return INVALID_ARGUMENT;
    *active = strcmp(d->links[link].kind, "down") != 0;
    return OK;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device *d, unsigned link, PciInfo *info) {
    ENTER(d);
    memset(info, 0, sizeof *info);
    if (link >= LINKS || !strcmp(d->links[link].kind, "unknown")) return NOT_SUPPORTED;
    if (d->links[link].peer >= 0) snprintf(info->busId, sizeof info->busId, "%s", gpus[d->links[link].peer]->pci);
    else snprintf(info->busId, sizeof info->busId, "00000000:C0:00.0");
    return OK;
}

int nvmlDeviceGetSupportedEventTypes(Device *d, unsigned long long *kinds) { ENTER(d); *kinds = KINDS; return OK; }
int nvmlEventSetCreate(EventSet **set) {
    ENTER(NULL);
    *set = sets;
    while (*set < sets + SETS - 1 && (*set)->used) ++*set;
    **set = (EventSet){.used = 1};
    return OK;
}
int nvmlDeviceRegisterEvents(Device *d, unsigned long long kinds, EventSet *set) {
    ENTER(d);
    if (!set->used) return INVALID_ARGUMENT;
    int slot = 0;
    while (slot < GPUS - 1 && set->device[slot] && set->device[slot] != d) slot++;
    set->device[slot] = d, set->kinds[slot] |= kinds;
    return OK;
}

/* Takes the first event for this set out of the queue. */
static int taken(EventSet *set, EventData *data) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < event_count && !found; i++)
        if (queue[i].set == set) {
            *data = queue[i].data, found = 1;
            memmove(queue + i, queue + i + 1, (size_t)(--event_count - i) * sizeof *queue);
        }
    pthread_mutex_unlock(&lock);
    return found;
}
int nvmlEventSetFree(EventSet *set) {
    EventData unheard;
    ENTER(NULL);
    while (taken(set, &unheard));
    set->used = 0;
    return OK;
}

#ifndef OLD_DRIVER
static unsigned long long microseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000;
}

int nvmlEventSetWait_v2(EventSet *set, EventData *data, unsigned milliseconds) {
    ENTER(NULL);
    if (!set->used) return INVALID_ARGUMENT;
    int script = plays, found;
    unsigned long long until = microseconds() + milliseconds * 1000ull / (unsigned)hurry;
    add(&waiting, 1);
    while (!(found = taken(set, data)) && script == plays && microseconds() < until) usleep(1000);
    add(&waiting, -1);
    return found ? OK : TIMEOUT;
}
int nvmlDeviceGetComputeRunningProcesses_v3(Device *d, unsigned *n, ProcessInfo *i) { ENTER(d); return listed(d, "compute", n, i); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(Device *d, unsigned *n, ProcessInfo *i) { ENTER(d); return listed(d, "graphics", n, i); }
int nvmlDeviceGetMPSComputeRunningProcesses_v3(Device *d, unsigned *n, ProcessInfo *i) { ENTER(d); return listed(d, "mps", n, i); }
int nvmlDeviceGetProcessUtilization(Device *d, Sample *samples, unsigned *count, unsigned long long since) {
    ENTER(d);
    if (d->mig_mode || d->slot >= 0) return NOT_SUPPORTED;
    unsigned found = 0, room = samples ? *count : 0;
    for (Process *p = processes; p < processes + process_count; p++) {
        if (p->gpu != d->index || p->sm < 0 || p->at <= since) continue;
        if (found < room) samples[found] = (Sample){.pid = (unsigned)p->pid, .at = p->at, .sm = (unsigned)p->sm};
        found++;
    }
    *count = found;
    return !found ? NOT_FOUND : found > room ? INSUFFICIENT_SIZE : OK;
}
int nvmlDeviceGetMemoryAffinity(Device *d, unsigned words, unsigned long *mask, int scope) {
    (void)scope;
    ENTER(d);
    memset(mask, 0, words * sizeof *mask);
    mask[0] = d->nodes;
    return d->nodes ? OK : NOT_SUPPORTED;
}
int nvmlDeviceGetNumaNodeId(Device *d, int *node) { ENTER(d); *node = d->own; return d->own < 0 ? NOT_SUPPORTED : OK; }
int nvmlDeviceGetNvLinkRemoteDeviceType(Device *d, unsigned link, unsigned *type) {
    ENTER(d);
    const char *kind = link < LINKS ? d->links[link].kind : "";
    *type = !strcmp(kind, "gpu") ? 0 : !strcmp(kind, "npu") ? 1 : !strcmp(kind, "switch") ? 2 : 255;
    return *kind ? OK : INVALID_ARGUMENT;
}
int nvmlDeviceGetFieldValues(Device *d, int count, FieldValue *values) {
    ENTER(d);
    for (int i = 0; i < count; i++) {
        values[i].ret = NOT_SUPPORTED;
        for (Field *f = d->field; f < d->field + d->fields; f++)
            if (f->id == values[i].fieldId) values[i].ret = f->ret, values[i].type = 1, values[i].value.ull = f->value;
    }
    return OK;
}
int nvmlDeviceGetGpuFabricInfo(Device *d, FabricInfo *info) {
    ENTER(d);
    memcpy(info->cluster, d->cluster, sizeof info->cluster);
    info->status = (unsigned)d->status, info->clique = (unsigned)d->clique, info->state = (unsigned)d->state;
    return d->fabric ? OK : NOT_SUPPORTED;
}
int nvmlDeviceGetGpuFabricInfoV(Device *d, FabricInfoV2 *info) {
    ENTER(d);
    memcpy(info->cluster, d->cluster, sizeof info->cluster);
    info->status = (unsigned)d->status, info->clique = (unsigned)d->clique, info->state = (unsigned)d->state, info->health = (unsigned)d->health;
    return d->fabric ? OK : NOT_SUPPORTED;
}
int nvmlDeviceGetMigMode(Device *d, unsigned *current, unsigned *pending) {
    ENTER(d);
    *current = *pending = (unsigned)d->mig_mode;
    return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(Device *d, unsigned *count) { ENTER(d); *count = MIGS; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(Device *d, unsigned index, Device **mig) {
    ENTER(d);
    if (index >= (unsigned)d->migs || d->mig[index]->ci < 0) return NOT_FOUND;
    *mig = d->mig[index];
    return OK;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device *mig, Device **d) { ENTER(mig); *d = mig->parent; return OK; }
int nvmlDeviceGetGpuInstanceId(Device *d, unsigned *id) { ENTER(d); *id = (unsigned)d->gi; return OK; }
int nvmlDeviceGetComputeInstanceId(Device *d, unsigned *id) { ENTER(d); *id = (unsigned)d->ci; return OK; }
typedef struct {
    unsigned version, id, p2p, slices, instances, sms, copy, decoder, encoder, jpeg, ofa;
    unsigned long long memory;
    char name[96];
} ProfileInfo;
typedef struct { Device *device; unsigned id, profile; Placement at; } InstanceInfo;

int nvmlDeviceGetGpuInstanceProfileInfoV(Device *d, unsigned kind, ProfileInfo *info) {
    ENTER(d);
    if (kind >= PROFILES || !d->profile[kind].used) return NOT_SUPPORTED;
    Profile *p = &d->profile[kind];
    unsigned version = info->version;
    *info = (ProfileInfo){.version = version, .id = (unsigned)p->id, .slices = (unsigned)p->slices, .sms = (unsigned)p->sms, .memory = p->memory};
    memcpy(info->name, p->name, sizeof info->name);
    return OK;
}
int nvmlDeviceGetGpuInstancePossiblePlacements_v2(Device *d, unsigned id, Placement *at, unsigned *count) {
    ENTER(d);
    for (Profile *p = d->profile; p < d->profile + PROFILES; p++) {
        if (!p->used || (unsigned)p->id != id) continue;
        if (at && *count < (unsigned)p->places) return INSUFFICIENT_SIZE;
        if (at) memcpy(at, p->at, (unsigned)p->places * sizeof *at);
        *count = (unsigned)p->places;
        return OK;
    }
    return INVALID_ARGUMENT;
}
int nvmlDeviceGetGpuInstanceById(Device *d, unsigned id, Device **instance) {
    ENTER(d);
    for (int i = 0; i < d->migs; i++)
        if ((unsigned)d->mig[i]->gi == id) { *instance = d->mig[i]; return OK; }
    return NOT_FOUND;
}
int nvmlGpuInstanceGetInfo(Device *instance, InstanceInfo *info) {
    ENTER(instance);
    *info = (InstanceInfo){.device = instance->parent, .id = (unsigned)instance->gi, .at = instance->place};
    return instance->place.size ? OK : NOT_SUPPORTED;
}

/* Making and destroying: a GPU instance is there without a MIG device until it has a compute instance. */

/* The file is the former or the new one, whenever the process ends. */
static void keep(void) {
    const char *path = getenv("NVML_STANDIN_KEPT");
    char draft[4096], name[96];
    if (!path) return;
    snprintf(draft, sizeof draft, "%s.new", path);
    FILE *file = fopen(draft, "w");
    if (!file) abort();
    for (int g = 0; g < gpu_count; g++)
        for (int i = 0; i < gpus[g]->migs; i++) {
            Device *m = gpus[g]->mig[i];
            memcpy(name, m->name, sizeof name);
            for (char *c = name; *c; c++) if (*c == ' ') *c = '_';
            fprintf(file, "mig %d gi=%d ci=%d uuid=%s name=%s memory=%llu", g, m->gi, m->ci, m->uuid, name, m->memory);
            fprintf(file, " slices=%d compute=%d place=%u:%u profile=%d\n", m->slices, m->compute, m->place.start, m->place.size, m->of_profile);
        }
    fclose(file);
    if (rename(draft, path)) abort();
}

static int has_uuid(Device *d, const char *uuid) {
    for (int i = 0; i < d->migs; i++) if (!strcmp(d->mig[i]->uuid, uuid)) return 1;
    return 0;
}

static const int slices_of[] = {1, 2, 3, 4, 7, 8, 6};

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **d) {
    ENTER(NULL);
    for (unsigned i = 0; i < visible(); i++)
        if (!strcmp(gpus[i]->uuid, uuid)) { *d = gpus[i]; return OK; }
    return NOT_FOUND;
}
int nvmlDeviceGetGpuInstances(Device *d, unsigned id, Device **found, unsigned *count) {
    ENTER(d);
    *count = 0;
    for (int i = 0; i < d->migs; i++) if ((unsigned)d->mig[i]->of_profile == id) found[(*count)++] = d->mig[i];
    return OK;
}
int nvmlDeviceCreateGpuInstanceWithPlacement(Device *d, unsigned id, const Placement *at, Device **made) {
    static int serial;
    ENTER(d);
    Profile *p = d->profile;
    while (p < d->profile + PROFILES && !(p->used && (unsigned)p->id == id)) p++;
    if (p == d->profile + PROFILES || d->migs == MIGS) return INVALID_ARGUMENT;
    int legal = 0, gi = 1;
    for (int i = 0; i < p->places; i++) legal |= p->at[i].start == at->start && p->at[i].size == at->size;
    for (int i = 0; i < d->migs; i++) {
        Placement *other = &d->mig[i]->place;
        if (at->start < other->start + other->size && other->start < at->start + at->size) legal = 0;
    }
    if (!legal) return INSUFFICIENT_RESOURCES;
    for (int i = 0; i < d->migs; i++) if (d->mig[i]->gi == gi) gi++, i = -1;
    Device *new = calloc(1, sizeof *new);
    new->parent = d, new->index = d->index, new->slot = d->migs, new->gi = gi, new->ci = -1, new->place = *at, new->busy = -1;
    new->slices = new->compute = p->slices, new->memory = p->memory, new->of_profile = (int)id;
    memcpy(new->name, p->name, sizeof new->name);
    do snprintf(new->uuid, sizeof new->uuid, "MIG-made-%d", ++serial); while (has_uuid(d, new->uuid));
    *made = d->mig[d->migs++] = new;
    keep();
    return OK;
}
int nvmlGpuInstanceGetComputeInstanceProfileInfoV(Device *gi, unsigned kind, unsigned engines, ProfileInfo *info) {
    (void)engines;
    ENTER(gi);
    if (kind >= sizeof slices_of / sizeof *slices_of || slices_of[kind] > gi->slices) return NOT_SUPPORTED;
    struct { unsigned version, id, slices; } *told = (void *)info;
    told->id = kind, told->slices = (unsigned)slices_of[kind];
    return OK;
}
int nvmlGpuInstanceCreateComputeInstance(Device *gi, unsigned id, Device **made) {
    ENTER(gi);
    if (gi->ci >= 0 || slices_of[id] != gi->slices) return INSUFFICIENT_RESOURCES;
    gi->ci = 0, *made = gi;
    keep();
    return OK;
}
int nvmlGpuInstanceGetComputeInstances(Device *gi, unsigned id, Device **found, unsigned *count) {
    ENTER(gi);
    *count = 0;
    if (gi->ci >= 0 && slices_of[id] == gi->slices) found[(*count)++] = gi;
    return OK;
}
int nvmlComputeInstanceDestroy(Device *ci) { ENTER(ci); ci->ci = -1; keep(); return OK; }
int nvmlGpuInstanceDestroy(Device *gi) {
    ENTER(gi);
    if (gi->ci >= 0) return IN_USE;
    Device *d = gi->parent;
    for (int i = 0; i < d->migs; i++)
        if (d->mig[i] == gi) { memmove(d->mig + i, d->mig + i + 1, (size_t)(--d->migs - i) * sizeof *d->mig); break; }
    keep();
    return OK;
}
int nvmlDeviceGetAttributes_v2(Device *d, Attributes *a) {
    ENTER(d);
    memset(a, 0, sizeof *a);
    a->gpuSlices = (unsigned)d->slices, a->computeSlices = (unsigned)d->compute, a->memory = d->memory;
    return OK;
}
#endif

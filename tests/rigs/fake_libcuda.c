/* A libcuda over this CPU's memory: pins by noting ranges, copies batches at once, and refuses what the driver refuses. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define RANGES 64
enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_REGISTERED = 713, CAPTURE_UNSUPPORTED = 900 };

static struct { uintptr_t start; size_t size; } ranges[RANGES];
static _Thread_local int has_context;
_Thread_local int capture_mode; /* 0: global, 1: of this thread, 2: relaxed */
int registrations, refuse_after = -1, batches, pieces, last_order;
int capturing, spoiled; /* a thread captures a graph, in torch's usual mode; a forbidden call spoils it */
size_t largest;

typedef struct { unsigned type; int id; } Location;
typedef struct { unsigned order; Location source, target; unsigned flags; } Attributes;

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : 0; }
int cuDeviceGet(int *device, int number) { *device = number; return number < 0 ? INVALID_VALUE : 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &ranges; return 0; }
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuCtxSetCurrent(void *context) { has_context = context != NULL; return 0; }

int cuThreadExchangeStreamCaptureMode(int *mode)
{
    int before = capture_mode;
    if (*mode < 0 || *mode > 2) return INVALID_VALUE;
    capture_mode = *mode;
    *mode = before;
    return 0;
}

int cuMemHostRegister_v2(void *address, size_t size, unsigned flags)
{
    if (capturing && capture_mode != 2) {
        spoiled++;
        return CAPTURE_UNSUPPORTED;
    }
    if (!has_context || flags != 3 || (uintptr_t)address % 4096) return INVALID_VALUE;
    if (registrations == refuse_after) return OUT_OF_MEMORY;
    for (int i = 0; i < RANGES; i++)
        if (!ranges[i].size) {
            ranges[i].start = (uintptr_t)address;
            ranges[i].size = size;
            registrations++;
            largest = size > largest ? size : largest;
            return 0;
        }
    return OUT_OF_MEMORY;
}

int cuMemHostUnregister(void *address)
{
    for (int i = 0; i < RANGES; i++)
        if (ranges[i].size && ranges[i].start == (uintptr_t)address) {
            ranges[i].size = 0;
            registrations--;
            return 0;
        }
    return NOT_REGISTERED;
}

int cuGetErrorName(int error, const char **name)
{
    *name = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_INVALID_VALUE";
    return error == OUT_OF_MEMORY || error == INVALID_VALUE ? 0 : INVALID_VALUE;
}

/* A piece that begins in a registered range has to end in it. */
static int straddles(uintptr_t address, size_t size)
{
    for (int i = 0; i < RANGES; i++) {
        uintptr_t start = ranges[i].start, end = start + ranges[i].size;
        if (ranges[i].size && address >= start && address < end) return address + size > end;
    }
    return 0;
}

static unsigned copy_batch(void **targets, void **sources, size_t *sizes, size_t count, Attributes *attributes,
                           size_t *first, size_t num_attributes, size_t *failed, void *stream)
{
    if (!stream || num_attributes != 1 || first[0] != 0) return INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        *failed = i;
        if (!sizes[i] || straddles((uintptr_t)targets[i], sizes[i]) || straddles((uintptr_t)sources[i], sizes[i]))
            return INVALID_VALUE;
    }
    for (size_t i = 0; i < count; i++) memcpy(targets[i], sources[i], sizes[i]);
    batches++;
    pieces += count;
    last_order = attributes->order;
    return 0;
}

int cuGetProcAddress_v2(const char *name, void **pointer, int version, uint64_t flags, int *status)
{
    *pointer = version == 12080 && !strcmp(name, "cuMemcpyBatchAsync") ? (void *)copy_batch : NULL;
    return 0;
}

// Runs recorded launches of the copy kernels on memory of exactly the size they need, for the sanitizers to watch.
//
// Of each launch it reads, little-endian: 11 integers of 64 bits (gather 0 or scatter 1, unit, grid's columns and rows,
// threads, layers, pairs, bytes of a layer, bytes of all slots, how far L1 and slots lie askew), 5 strides of 64 bits,
// 7 counts of 32 bits, then the layers, the slots, the blocks' numbers and the slots' numbers. It writes layers and slots.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct dim3 { unsigned x, y; };
static dim3 gridDim, blockDim, blockIdx, threadIdx;
#include "kernels.inc"

template <class Kernel>
static void launch(Kernel kernel, const long long *head, const unsigned long long *bases, const long long *blocks,
                   const long long *slots, unsigned char *kept, const long long *s, const unsigned *c)
{
    gridDim = {(unsigned)head[2], (unsigned)head[3]};
    blockDim = {(unsigned)head[4], 1};
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
            for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)
                kernel(bases, blocks, slots, kept, s[0], s[1], s[2], s[3], s[4], c[0], c[1], c[2], c[3], c[4], c[5], c[6]);
}

static void take(void *into, size_t bytes, FILE *in)
{
    if (fread(into, 1, bytes, in) != bytes) exit(3);
}

int main(int, char **argv)
{
    FILE *in = fopen(argv[1], "rb"), *out = fopen(argv[2], "wb");
    long long head[11], strides[5];
    unsigned counts[7];
    while (fread(head, 1, sizeof head, in) == sizeof head) {
        take(strides, sizeof strides, in);
        take(counts, sizeof counts, in);
        const size_t layers = head[5], pairs = head[6], layer_bytes = head[7], slot_bytes = head[8];
        std::vector<unsigned char *> own(layers);
        auto *bases = (unsigned long long *)malloc(8 * layers);
        for (size_t i = 0; i < layers; i++) {
            own[i] = (unsigned char *)malloc(layer_bytes + head[9]);
            take(own[i] + head[9], layer_bytes, in);
            bases[i] = (unsigned long long)(own[i] + head[9]);
        }
        auto *kept = (unsigned char *)malloc(slot_bytes + head[10]);
        take(kept + head[10], slot_bytes, in);
        auto *blocks = (long long *)malloc(8 * pairs), *slots = (long long *)malloc(8 * pairs);
        take(blocks, 8 * pairs, in);
        take(slots, 8 * pairs, in);
#define LAUNCH(UNIT_BYTES)                                                                                             \
    if (head[1] == UNIT_BYTES && head[0] == 0)                                                                         \
        launch(kv_gather_##UNIT_BYTES, head, bases, blocks, slots, kept + head[10], strides, counts);                  \
    if (head[1] == UNIT_BYTES && head[0] == 1)                                                                         \
        launch(kv_scatter_##UNIT_BYTES, head, bases, blocks, slots, kept + head[10], strides, counts);
        LAUNCH(16) LAUNCH(8) LAUNCH(4) LAUNCH(2) LAUNCH(1)
        for (auto *layer : own) fwrite(layer + head[9], 1, layer_bytes, out);
        fwrite(kept + head[10], 1, slot_bytes, out);
        for (auto *layer : own) free(layer);
        free(bases), free(kept), free(blocks), free(slots);
    }
    fclose(out);
    return 0;
}

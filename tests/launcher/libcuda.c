/* The CUDA driver API as far as Triton's launcher calls it, which remembers what a kernel is given. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

int num_sizes, launches, encoded;
int sizes[256];                    /* bytes of each parameter, set by the test */
unsigned char parameters[1 << 14]; /* of the last launch, one after another */
unsigned grid[2];
void *stream;

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **values, void **extra) {
  unsigned char *end = parameters;
  launches++;
  grid[0] = config->gridDimX, grid[1] = config->gridDimY;
  stream = config->hStream;
  for (int n = 0; n < num_sizes; end += sizes[n++]) memcpy(end, values[n], sizes[n]);
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *shape, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  uint64_t *words = (uint64_t *)map;
  memset(map, 0, sizeof *map);
  encoded++;
  words[0] = (uint64_t)address, words[1] = 100 * type + swizzle;
  for (cuuint32_t n = 0; n < rank; n++) words[2 + n] = shape[n], words[7 + n] = box[n];
  for (cuuint32_t n = 0; n + 1 < rank; n++) words[12 + n] = strides[n];
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = 232448; /* asked for the shared memory of a block */
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction f) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)malloc(1);
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name) {
  *f = (CUfunction)module;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "";
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = 0, CUDA_SUCCESS; }

/* Declared by other names in cuda.h, or with arguments that do not matter here. */
#define DOES_NOTHING(name) \
  __asm__(".globl " #name "\n.set " #name ", nothing");
int nothing(void) { return 0; }
DOES_NOTHING(cuCtxGetDevice)
DOES_NOTHING(cuCtxGetLimit)
DOES_NOTHING(cuCtxSetCurrent)
DOES_NOTHING(cuCtxSetLimit)
DOES_NOTHING(cuDevicePrimaryCtxRetain)
DOES_NOTHING(cuDriverGetVersion)
DOES_NOTHING(cuFuncSetAttribute)
DOES_NOTHING(cuFuncSetCacheConfig)
DOES_NOTHING(cuModuleUnload)
DOES_NOTHING(cuOccupancyMaxActiveClusters)
DOES_NOTHING(cuPointerGetAttributes)
DOES_NOTHING(cuStreamIsCapturing)
DOES_NOTHING(cuTensorMapEncodeIm2col)

// A libcuda for tests: it does nothing, and remembers the last launch. The program that loads it says how many parameters the next kernel has.
#include <cuda.h>

int num_params, num_launches;
unsigned long long params_seen[64], stream_seen;

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra) {
    num_launches++;
    for (int i = 0; i < num_params; i++)
        params_seen[i] = *(unsigned long long *)params[i];
    stream_seen = (unsigned long long)config->hStream;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    *(CUdeviceptr *)data = pointer;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = 227 << 10;  // bytes of shared memory, of an H100
    return CUDA_SUCCESS;
}

#define HANDLE(type, name, ...) \
    CUresult name(type *made, ##__VA_ARGS__) { *made = (type)1; return CUDA_SUCCESS; }
HANDLE(CUcontext, cuCtxGetCurrent)
HANDLE(CUcontext, cuDevicePrimaryCtxRetain, CUdevice device)
HANDLE(CUmodule, cuModuleLoadData, const void *image)
HANDLE(CUfunction, cuModuleGetFunction, CUmodule module, const char *name)
HANDLE(size_t, cuCtxGetLimit, CUlimit limit)
HANDLE(int, cuDriverGetVersion)

CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { *status = CU_STREAM_CAPTURE_STATUS_NONE; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int number) { *device = number; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **said) { *said = "the stand-in"; return CUDA_SUCCESS; }

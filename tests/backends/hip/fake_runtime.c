/* Stands in for libamdhip64 where no GPU is: records every call, runs nothing, fails on request. */
#include <stdio.h>
#include <string.h>

#ifndef ARCH
#define ARCH "gfx942:sramecc+:xnack-"
#endif

static char log_[1 << 16];
static int device_, last_, fail_launch_;

static void note(const char* what) {
    if (strlen(log_) + strlen(what) + 2 < sizeof log_) strcat(strcat(log_, what), "\n");
}
const char* fake_log(void) { return log_; }
void fake_clear(void) { log_[0] = 0; }
void fake_fail_launch(int code) { fail_launch_ = code; }
void fake_current(int device) { device_ = device; }

int hipGetDeviceCount(int* n) { return *n = 2, 0; }
int hipGetDevice(int* d) { return *d = device_, 0; }
int hipSetDevice(int d) {
    char text[64];
    snprintf(text, sizeof text, "SetDevice %d", d);
    note(text);
    return d < 2 ? (device_ = d, 0) : (last_ = 101);
}
int hipDeviceGetAttribute(int* v, int attribute, int d) { return *v = attribute == 63 ? 304 + d : 0, 0; }
int hipGetDevicePropertiesR0600(char* p, int d) {
    (void)d;
    strcpy(p, "AMD Instinct gfx marketing");
    strcpy(p + 1160, ARCH);
    return 0;
}
int hipModuleLoadData(void** m, const void* image) {
    note("ModuleLoadData");
    *m = &log_;
    return memcmp(image, "\177ELF", 4) ? (last_ = 200) : 0;
}
int hipModuleUnload(void* m) { return (void)m, note("ModuleUnload"), 0; }
int hipModuleGetFunction(void** f, void* m, const char* name) {
    (void)m;
    note("ModuleGetFunction");
    *f = (void*)name;
    return strstr(name, "missing") ? (last_ = 500) : 0;
}
int hipModuleLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned lds,
                          void* stream, void** params, void** extra) {
    char text[256];
    (void)f, (void)params, (void)extra;
    snprintf(text, sizeof text, "LaunchKernel grid %u %u %u block %u %u %u lds %u stream %p device %d", gx, gy, gz, bx, by, bz, lds,
             stream, device_);
    note(text);
    return fail_launch_ ? (last_ = fail_launch_) : 0;
}
const char* hipGetErrorString(int code) { return code == 719 ? "unspecified launch failure" : "some error"; }
int hipGetLastError(void) {
    int code = last_;
    last_ = 0;
    note("GetLastError");
    return code;
}
/* Anything of these in a log means that launching allocated or waited. */
int hipMalloc(void** p, size_t n) { return (void)p, (void)n, note("Malloc"), 2; }
int hipMemcpy(void* a, const void* b, size_t n, int kind) { return (void)a, (void)b, (void)n, (void)kind, note("Memcpy"), 1; }
int hipStreamSynchronize(void* s) { return (void)s, note("StreamSynchronize"), 0; }
int hipDeviceSynchronize(void) { return note("DeviceSynchronize"), 0; }

/* A library with NVML's symbols, for machines without a GPU. Tests compile it as libnvidia-ml.so.1 and put it on LD_LIBRARY_PATH.
 *
 * Environment: STANDIN_DEVICES (default 2), of which STANDIN_CLOSED=n may not be opened; STANDIN_OLD=1: a chip without GPM, NVLink, energy, a power cap, a highest clock, and PCIe counters;
 * STANDIN_CLUSTER=n: the number of the network that NVLink makes of several hosts, with STANDIN_CLIQUE its part and
 * STANDIN_FABRIC_STATE how far it is (default 3: completed), and with which result (STANDIN_FABRIC_STATUS);
 * STANDIN_REASONS=bits: why clocks are held back (default 4: the power cap); STANDIN_XID=1: one XID;
 * STANDIN_FAIL_AFTER=n: reading number n and all later fail (the GPU is lost); STANDIN_HANG_AFTER=n: reading number n takes 30 s;
 * STANDIN_GARBAGE=1: readings that cannot be; STANDIN_NAN=1: GPM gives NaN for its DRAM figure, as an H100 did once. Structures are those of nvml.h (docs.nvidia.com/deploy/nvml-api).
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, GPU_IS_LOST = 15 };
typedef unsigned long long u64;
typedef size_t Device;

static int setting(const char *name, int otherwise) {
  const char *text = getenv(name);
  return text ? atoi(text) : otherwise;
}

static int num_readings;

/* What every reading does first. */
static int reading(void) {
  int number = ++num_readings;
  int fail = setting("STANDIN_FAIL_AFTER", 0), hang = setting("STANDIN_HANG_AFTER", 0);
  if (hang && number == hang) sleep(30);
  return fail && number >= fail ? GPU_IS_LOST : SUCCESS;
}

static int garbage(void) { return setting("STANDIN_GARBAGE", 0); }
static int old(void) { return setting("STANDIN_OLD", 0); }

int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == GPU_IS_LOST ? "GPU is lost" : "an error of the stand-in"; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
  snprintf(text, size, garbage() ? "\xff\xfe" : "999.1");
  return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = setting("STANDIN_DEVICES", 2);
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
  if ((int)index == setting("STANDIN_CLOSED", -1)) return NO_PERMISSION;
  *device = index + 1;
  return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device *device) {
  size_t index;
  if (sscanf(uuid, "GPU-0000-%zu", &index) != 1) return NOT_FOUND;
  *device = index + 1;
  return SUCCESS;
}

int nvmlDeviceGetName(Device device, char *text, unsigned size) {
  snprintf(text, size, garbage() ? "\xff\xfe" : "Stand-in %zu", device - 1);
  return SUCCESS;
}

int nvmlDeviceGetUUID(Device device, char *text, unsigned size) {
  snprintf(text, size, "GPU-0000-%zu", device - 1);
  return SUCCESS;
}

struct Pci {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char address[32];
};

int nvmlDeviceGetPciInfo_v3(Device device, struct Pci *pci) {
  memset(pci, 0, sizeof *pci);
  pci->bus = 0x40 + (unsigned)device;
  return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Device device, unsigned rates[2]) {
  rates[0] = garbage() ? 4000000000u : 50 + (unsigned)device;
  rates[1] = 7;
  return reading();
}

int nvmlDeviceGetMemoryInfo(Device device, u64 memory[3]) {
  memory[0] = 80ull << 30;
  memory[2] = garbage() ? 900ull << 30 : 3ull << 30;
  memory[1] = memory[0] - memory[2];
  return reading();
}

int nvmlDeviceGetPowerUsage(Device device, unsigned *milliwatts) {
  *milliwatts = garbage() ? 4000000000u : 123456;
  return reading();
}

int nvmlDeviceGetEnforcedPowerLimit(Device device, unsigned *milliwatts) {
  if (old()) return NOT_SUPPORTED;
  *milliwatts = 700000;
  return reading();
}

int nvmlDeviceGetTotalEnergyConsumption(Device device, u64 *millijoules) {
  if (old()) return NOT_SUPPORTED;
  static u64 used = 42000000;
  *millijoules = used += 1000;
  return reading();
}

int nvmlDeviceGetTemperature(Device device, int sensor, unsigned *celsius) {
  *celsius = garbage() ? 0xffffffffu : 55;
  return reading();
}

int nvmlDeviceGetClockInfo(Device device, int kind, unsigned *megahertz) {
  *megahertz = kind == 1 ? 1980 : 2619;
  return reading();
}

int nvmlDeviceGetMaxClockInfo(Device device, int kind, unsigned *megahertz) {
  if (old()) return NOT_SUPPORTED;
  *megahertz = kind == 1 ? 2010 : 2619;
  return reading();
}

/* Only the older name: drivers before 535. */
int nvmlDeviceGetCurrentClocksThrottleReasons(Device device, u64 *bits) {
  *bits = setting("STANDIN_REASONS", 0x4);
  return reading();
}

struct Field {
  unsigned id, scope;
  long long at, latency;
  int type, result;
  u64 value;
};

int nvmlDeviceGetFieldValues(Device device, int count, struct Field *fields) {
  static u64 moved;
  for (int i = 0; i < count; i++) {
    int is_counter = fields[i].id == 197 || fields[i].id == 198 || fields[i].id == 138 || fields[i].id == 139;
    fields[i].type = garbage() ? 77 : 3;
    fields[i].result = old() || !(is_counter || fields[i].id == 82) ? NOT_SUPPORTED : SUCCESS;
    fields[i].value = is_counter ? (moved += 1 << 20) : 60;
  }
  return reading();
}

int nvmlDeviceGetPcieThroughput(Device device, int way, unsigned *kilobytes) {
  *kilobytes = 1000 + way;
  return reading();
}

struct Fabric {
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique, state, health;
};

int nvmlDeviceGetGpuFabricInfoV(Device device, struct Fabric *fabric) {
  if (old()) return NOT_SUPPORTED;
  memset(fabric->cluster, setting("STANDIN_CLUSTER", 0), sizeof fabric->cluster);
  fabric->status = setting("STANDIN_FABRIC_STATUS", SUCCESS);
  fabric->clique = setting("STANDIN_CLIQUE", 0);
  fabric->state = setting("STANDIN_FABRIC_STATE", 3); /* 3: completed */
  return reading();
}

struct Process {
  unsigned pid;
  u64 used;
  unsigned instance, compute_instance;
};

int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *count, struct Process *processes) {
  if (*count < 1) {
    *count = 1;
    return INSUFFICIENT_SIZE;
  }
  *count = 1;
  processes[0] = (struct Process){4321, 2ull << 30, 0, 0};
  return reading();
}

int nvmlDeviceGetTotalEccErrors(Device device, int kind, int counter, u64 *count) {
  static u64 corrected;
  *count = kind == 0 ? corrected++ : 0;
  return reading();
}

struct Event {
  Device device;
  u64 type, data;
  unsigned instance, compute_instance;
};

int nvmlEventSetCreate(void **set) {
  *set = (void *)1;
  return SUCCESS;
}

int nvmlDeviceRegisterEvents(Device device, u64 types, void *set) { return SUCCESS; }

int nvmlEventSetWait_v2(void *set, struct Event *event, unsigned timeout_ms) {
  static int told;
  if (!setting("STANDIN_XID", 0) || told) return TIMEOUT;
  told = 1;
  memset(event, 0, sizeof *event);
  event->type = 8;
  event->data = 79;
  return SUCCESS;
}

int nvmlGpmQueryDeviceSupport(Device device, unsigned support[2]) {
  support[1] = !old();
  return SUCCESS;
}

int nvmlGpmSampleAlloc(void **sample) {
  *sample = malloc(8);
  return SUCCESS;
}

int nvmlGpmSampleGet(Device device, void *sample) { return reading(); }

struct Metric {
  unsigned id;
  int result;
  double value;
  const char *names[3];
};

struct Metrics {
  unsigned version, count;
  void *before, *now;
  struct Metric metrics[];
};

int nvmlGpmMetricsGet(struct Metrics *asked) {
  if (!asked->before || !asked->now) return NOT_SUPPORTED;
  for (unsigned i = 0; i < asked->count; i++) {
    int dram = asked->metrics[i].id == 10, unmeasured = dram && setting("STANDIN_NAN", 0);
    asked->metrics[i].result = dram && !unmeasured ? NOT_SUPPORTED : SUCCESS; /* no DRAM figure */
    asked->metrics[i].value = unmeasured ? NAN : garbage() ? 1e30 : 10.0 + asked->metrics[i].id;
  }
  return reading();
}

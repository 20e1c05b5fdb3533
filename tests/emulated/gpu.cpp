// What torch asks of CUDA in C++, where there is none: which device and stream a thread works on, events between streams (for autograd), and when memory is given
// back. Compiled by tests; emulated/gpu.py loads it before torch asks for the first time.
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/dlpack.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <atomic>
#include <deque>
#include <mutex>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <unordered_map>
#include <unordered_set>

namespace {
constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr int MOST_DEVICES = 64;
c10::DeviceIndex num_devices = 1;
thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_streams[MOST_DEVICES] = {};

using Record = int64_t (*)(int device, int64_t stream);
using Block = void (*)(int64_t event, int device, int64_t stream);
Record record_event = nullptr;
Block block_on_event = nullptr;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  c10::Device getDevice() const override { return {CUDA, current_device}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto old = getDevice();
    setDevice(device);
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices; }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, current_streams[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<int64_t> made{1 << 20};
    return c10::Stream(c10::Stream::UNSAFE, device, made++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto old = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return old;
  }
  void record(void **event, const c10::Stream &stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void *>(record_event(stream.device_index(), stream.id()));
  }
  void block(void *event, const c10::Stream &stream) const override {
    block_on_event(reinterpret_cast<int64_t>(event), stream.device_index(), stream.id());
  }
  void destroyEvent(void *, const c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr &, const c10::Stream &) const override {}
};

std::mutex pinning;
std::unordered_set<const void *> pinned;

void free_pinned(void *memory) {
  std::lock_guard<std::mutex> guard(pinning);
  pinned.erase(memory);
  free(memory);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard<std::mutex> guard(pinning);
    void *memory = aligned_alloc(64, (bytes / 64 + 1) * 64);
    pinned.insert(memory);
    return {memory, memory, free_pinned, c10::DeviceType::CPU};
  }
  void copy_data(void *to, const void *from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

// torch looks for this very name.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return num_devices; }
  c10::DeviceIndex deviceCount() const override { return num_devices; }
  c10::DeviceIndex current_device() const override { return ::current_device; }
  c10::DeviceIndex getCurrentDevice() const override { return ::current_device; }
  bool isPinnedPtr(const void *data) const override {
    std::lock_guard<std::mutex> guard(pinning);
    return pinned.count(data);
  }
  c10::Allocator *getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
  const at::Generator &getDefaultGenerator(c10::DeviceIndex) const override { return at::globalContext().defaultGenerator(at::kCPU); }
  std::string showConfig() const override { return "emulated"; }
};

// Memory of a device, and how to free it. stream: where it was allocated.
struct Memory {
  int64_t address, device, stream;
  void (*free)(void *);
  void *context;
};
std::mutex lock;
std::unordered_map<void *, Memory> in_use;  // by context
std::deque<Memory> given_back;

void give_back(void *context) {
  std::lock_guard<std::mutex> guard(lock);
  given_back.push_back(in_use[context]);
  in_use.erase(context);
}
void keep(void *context, const Memory &memory) {
  std::lock_guard<std::mutex> guard(lock);
  in_use[context] = memory;
}
}  // namespace

namespace at { REGISTER_CUDA_HOOKS(CUDAHooks) }

// DistributedDataParallel's, by the host's clock.
namespace c10d {
struct EmulatedTimer final : Timer {
  explicit EmulatedTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, CUDA, EmulatedTimer)
}  // namespace c10d

extern "C" {
void emulated_start(int count, Record record, Block block) {
  num_devices = count;
  record_event = record;
  block_on_event = block;
  static Guard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(CUDA)].store(&guard);
}
int emulated_device() { return current_device; }
void emulated_set_device(int device) { current_device = device; }
int64_t emulated_stream(int device) { return current_streams[device]; }
void emulated_set_stream(int device, int64_t stream) { current_streams[device] = stream; }

// From now on the end of a tensor's memory is noted.
void emulated_own(DLManagedTensor *tensor, int64_t stream) {
  auto address = reinterpret_cast<int64_t>(tensor->dl_tensor.data);
  keep(tensor, {address, tensor->dl_tensor.device.device_id, stream, reinterpret_cast<void (*)(void *)>(tensor->deleter), tensor});
  tensor->deleter = reinterpret_cast<void (*)(DLManagedTensor *)>(give_back);
}
// Gives a storage other memory; what was there is given back.
void emulated_resize(c10::StorageImpl *storage, int64_t bytes, int64_t stream) {
  auto device = storage->device();
  void *memory = bytes ? malloc(bytes) : nullptr;
  if (memory) keep(memory, {reinterpret_cast<int64_t>(memory), device.index(), stream, free, memory});
  storage->set_data_ptr_noswap(c10::DataPtr(memory, memory, memory ? give_back : [](void *) {}, device));
  storage->set_nbytes(bytes);
}
// The next memory that was given back: its address, device and stream, and what to call `emulated_free` with. Returns whether there was one.
int emulated_given_back(int64_t *out) {
  std::lock_guard<std::mutex> guard(lock);
  if (given_back.empty()) return 0;
  auto memory = given_back.front();
  given_back.pop_front();
  out[0] = memory.address, out[1] = memory.device, out[2] = memory.stream;
  out[3] = reinterpret_cast<int64_t>(memory.free), out[4] = reinterpret_cast<int64_t>(memory.context);
  return 1;
}
void emulated_free(void (*free)(void *), void *context) { free(context); }
}

// A CUDA device in the host's memory. Tensors on it are torch's own, with its dispatcher and its
// autograd; each operation runs torch's CPU kernel on the same bytes, at once. What a GPU refuses is
// refused here too: operands on two devices, pinned memory of its own, and results that are read
// while a graph is recorded. What it does later is done at once, so races do not show.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace simulated {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::IValue;
using c10::Stream;
using c10::StreamId;

// Each process has a GPU of its own, of as many as there are processes.
DeviceIndex number_of(const char* name, DeviceIndex otherwise) {
  const char* told = std::getenv(name);
  return told == nullptr ? otherwise : static_cast<DeviceIndex>(std::atoi(told));
}
const DeviceIndex kRank = number_of("LOCAL_RANK", 0);
const DeviceIndex kCount = number_of("LOCAL_WORLD_SIZE", number_of("SIMULATED_GPUS", 1));
const Device kGpu(DeviceType::CUDA, kRank);
const Device kHost(DeviceType::CPU);

// ---- The device, its streams and events. Python's are in cuda.py; these are what torch's C++ asks.

thread_local StreamId current_stream = 0;
std::atomic<StreamId> last_stream{0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return kGpu; }
  Device getDevice() const override { return kGpu; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return kCount; }
  Stream getStream(Device) const override { return Stream(Stream::UNSAFE, kGpu, current_stream); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::UNSAFE, kGpu, 0); }
  Stream getNewStream(Device, int) const override {
    return Stream(Stream::UNSAFE, kGpu, ++last_stream);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream stream) const override {
    auto old = getStream(kGpu);
    current_stream = stream.id();
    return old;
  }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    static int any;
    *event = &any;
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// ---- Memory: the device's, counted, and the host's pinned.

std::atomic<int64_t> live{0}, peak{0}, reserved{0};  // reserved: as by torch's own allocator
std::mutex pinned_lock;
std::map<const char*, size_t> pinned;

struct Block {
  void* data;
  size_t bytes;
};

Block* new_block(size_t bytes) {
  void* data = nullptr;
  TORCH_CHECK(posix_memalign(&data, 512, bytes) == 0, "CUDA out of memory: ", bytes, " bytes");
  return new Block{data, bytes};
}

void raise_to(std::atomic<int64_t>& most, int64_t now) {
  auto seen = most.load();
  while (now > seen && !most.compare_exchange_weak(seen, now)) {
  }
}

struct DeviceMemory final : c10::Allocator {
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    live -= static_cast<int64_t>(block->bytes);
    std::free(block->data);
    delete block;
  }
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, [](void*) {}, kGpu};
    auto* block = new_block(bytes);
    // A GPU's new memory holds anything: here NaN, in every type of float.
    std::memset(block->data, 0xff, bytes);
    auto now = live += static_cast<int64_t>(bytes);
    raise_to(peak, now);
    raise_to(reserved, now);
    return {block->data, block, &release, kGpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
} device_memory;

struct PinnedMemory final : c10::Allocator {
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    {
      std::lock_guard<std::mutex> hold(pinned_lock);
      pinned.erase(static_cast<const char*>(block->data));
    }
    std::free(block->data);
    delete block;
  }
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, [](void*) {}, kHost};
    auto* block = new_block(bytes);
    std::lock_guard<std::mutex> hold(pinned_lock);
    pinned[static_cast<const char*>(block->data)] = bytes;
    return {block->data, block, &release, kHost};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
} pinned_memory;

bool is_pinned(const void* data) {
  auto at = static_cast<const char*>(data);
  std::lock_guard<std::mutex> hold(pinned_lock);
  auto after = pinned.upper_bound(at);
  if (after == pinned.begin()) return false;
  auto [start, bytes] = *std::prev(after);
  return at < start + bytes;
}

REGISTER_ALLOCATOR(c10::DeviceType::CUDA, &device_memory)

// torch looks for hooks of this name once, before anything else asks for a GPU: so this library is
// loaded before torch is imported.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kCount; }
  DeviceIndex getCurrentDevice() const override { return kRank; }
  DeviceIndex current_device() const override { return kRank; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return kRank; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return kRank; }
  int getNumGPUs() const override { return kCount; }
  void deviceSynchronize(DeviceIndex) const override {}
  Device getDeviceFromPtr(void*) const override { return kGpu; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    static auto made = at::detail::createCPUGenerator();
    return made;
  }
};
using at::CUDAHooksArgs;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

// ---- Operations, by torch's CPU kernels.

// The same bytes as a tensor of the host.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  static char nothing;
  auto* data = tensor.data_ptr();
  auto made = at::for_blob(data == nullptr ? &nothing : data, tensor.sizes())
                  .strides(tensor.strides())
                  .deleter([tensor](void*) {})  // which keeps it
                  .options(tensor.options().device(kHost).requires_grad(false))
                  .target_device(kHost)
                  .make_tensor();
  if (tensor.is_conj()) made._set_conj(true);
  return made;
}

Tensor on_device(const Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cuda()) return tensor;
  auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(kGpu));
  on_host(made).copy_(tensor);
  return made;
}

void move(IValue& value, Tensor (*moved)(const Tensor&)) {
  if (value.isTensor()) {
    value = moved(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<Tensor> made;
    for (const Tensor& tensor : value.toTensorVector()) made.push_back(moved(tensor));
    value = made;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (std::optional<Tensor> tensor : value.toOptionalTensorList())
      made.push_back(tensor ? std::optional<Tensor>(moved(*tensor)) : tensor);
    value = made;
  } else if (value.isDevice() && value.toDevice().is_cuda()) {
    value = kHost;
  }
}

template <typename Look>
void each_tensor(const std::vector<IValue>& values, Look look) {
  for (const auto& value : values) {
    if (value.isTensor()) look(value.toTensor());
    if (value.isTensorList())
      for (const Tensor& tensor : value.toTensorVector()) look(tensor);
    if (value.isOptionalTensorList())
      for (std::optional<Tensor> tensor : value.toOptionalTensorList())
        if (tensor) look(*tensor);
  }
}

struct Call {
  c10::OperatorHandle op;
  std::vector<IValue> arguments, results;
};
std::vector<std::unique_ptr<std::vector<Call>>> recordings;
std::vector<Call>* recording = nullptr;  // the graph that is being recorded
std::atomic<bool> refuses_waits{false};

// What a GPU would not do.
void check(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  static const std::set<std::string> over_devices = {
      "aten::copy_", "aten::_to_copy", "aten::set_", "aten::index", "aten::_index_put_impl_"};
  static const std::set<std::string> waiting = {
      "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select",
      "aten::_unique2", "aten::unique_consecutive"};
  const auto& name = op.schema().name();
  bool host = false, gpu = false;
  each_tensor(arguments, [&](const Tensor& tensor) {
    gpu |= tensor.defined() && tensor.is_cuda();
    host |= tensor.defined() && tensor.is_cpu() && tensor.dim() > 0;  // a number may be anywhere
  });
  TORCH_CHECK(!host || !gpu || over_devices.count(name),
              "Expected all tensors to be on the same device, but found at least two devices, "
              "cuda and cpu (", name, ")");
  if (recording == nullptr && !refuses_waits) return;
  bool waits = waiting.count(name) > 0;
  if (name == "aten::copy_" && host) {
    auto to = arguments[0].toTensor(), from = arguments[1].toTensor();
    bool may_go_on = arguments[2].toBool() && is_pinned((to.is_cuda() ? from : to).data_ptr());
    waits = recording != nullptr || !may_go_on;
  }
  TORCH_CHECK(!waits || recording == nullptr,
              "operation not permitted when stream is capturing (", name, ")");
  TORCH_CHECK(!waits, "called a synchronizing CUDA operation (", name, ")");
}

std::vector<IValue> on_cpu(const c10::OperatorHandle& op, std::vector<IValue> stack) {
  const auto& formal = op.schema().arguments();
  for (size_t i = 0; i < stack.size(); ++i) {
    bool is_out = formal[i].is_out() && stack[i].isTensor() && stack[i].toTensor().is_cuda();
    if (is_out)  // it may have to grow, which foreign memory cannot
      stack[i] = at::empty({0}, stack[i].toTensor().options().device(kHost));
    else
      move(stack[i], &on_host);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(stack);
  return stack;
}

// The argument that a result is: of operations in place, and of `out=`; -1 if it is new.
int64_t written(const c10::FunctionSchema& schema, size_t result) {
  const auto* alias = schema.returns()[result].alias_info();
  if (alias == nullptr) return -1;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* of = schema.arguments()[i].alias_info();
    if (of != nullptr && of->isWrite() && *of == *alias) return static_cast<int64_t>(i);
  }
  TORCH_CHECK(false, "the simulated GPU has no view ", schema.name());
}

void run(const c10::OperatorHandle& op, c10::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = static_cast<int64_t>(schema.arguments().size());
  std::vector<IValue> arguments(stack->end() - count, stack->end());
  stack->resize(stack->size() - static_cast<size_t>(count));
  check(op, arguments);
  auto results = on_cpu(op, arguments);
  for (size_t i = 0; i < results.size(); ++i) {
    const auto from = results[i].isTensor() ? written(schema, i) : -1;
    if (from < 0) {
      move(results[i], &on_device);
      continue;
    }
    if (schema.arguments()[static_cast<size_t>(from)].is_out()) {
      auto to = arguments[static_cast<size_t>(from)].toTensor(), made = results[i].toTensor();
      if (to.sizes() != made.sizes()) to.resize_(made.sizes());
      on_host(to).copy_(made);
    }
    results[i] = arguments[static_cast<size_t>(from)];
  }
  if (recording != nullptr) recording->push_back({op, arguments, results});
  for (auto& value : results) stack->push_back(std::move(value));
}

// ---- What makes tensors, and views.

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout>, std::optional<Device>, std::optional<bool> pin,
             std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_memory,
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device>, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_memory,
      c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

int64_t plain(const c10::SymInt& number) { return number.guard_int(__FILE__, __LINE__); }

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(plain(*offset)) : std::nullopt);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size),
                                    C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}

Tensor& set_storage(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(plain(offset));
  if (stride.size() == size.size())
    impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  else
    impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  return self;
}

// A storage's memory, of another size; what fits is kept.
void resize_storage(const Tensor& of, int64_t bytes) {
  auto& storage = const_cast<c10::Storage&>(of.unsafeGetTensorImpl()->storage());
  auto made = device_memory.allocate(static_cast<size_t>(bytes));
  auto kept = std::min(storage.nbytes(), static_cast<size_t>(bytes));
  if (kept > 0) std::memcpy(made.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(made));
  storage.set_nbytes(static_cast<size_t>(bytes));
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size,
                     std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto numbers = c10::multiply_integers(sizes) + self.storage_offset();
  auto bytes = numbers * static_cast<int64_t>(self.element_size());
  if (static_cast<int64_t>(self.storage().nbytes()) < bytes) resize_storage(self, bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

// ---- CUDA graphs: what was run is run again, into the same tensors.

int64_t begin_recording() {
  TORCH_CHECK(recording == nullptr, "a graph is being recorded already");
  recordings.push_back(std::make_unique<std::vector<Call>>());
  recording = recordings.back().get();
  return static_cast<int64_t>(recordings.size()) - 1;
}

int64_t recorded() { return recording == nullptr ? -1 : static_cast<int64_t>(recording->size()); }

void end_recording() { recording = nullptr; }

void replay(int64_t graph, int64_t start, int64_t stop) {
  auto put = [](const Tensor& to, const Tensor& from) {
    if (to.defined() && to.is_cuda() && to.data_ptr() != from.data_ptr()) on_host(to).copy_(from);
  };
  auto& calls = *recordings.at(static_cast<size_t>(graph));
  for (auto i = start; i < stop; ++i) {
    auto& call = calls[static_cast<size_t>(i)];
    auto made = on_cpu(call.op, call.arguments);
    for (size_t k = 0; k < made.size(); ++k) {
      if (made[k].isTensor()) put(call.results[k].toTensor(), made[k].toTensor());
      if (made[k].isTensorList()) {
        auto to = call.results[k].toTensorVector(), from = made[k].toTensorVector();
        for (size_t j = 0; j < to.size(); ++j) put(to[j], from[j]);
      }
    }
  }
}

void drop_recording(int64_t graph) { recordings.at(static_cast<size_t>(graph)).reset(); }

}  // namespace simulated

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&simulated::run>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &simulated::empty);
  m.impl("empty_strided", &simulated::empty_strided);
  m.impl("as_strided", &simulated::as_strided);
  m.impl("view", &simulated::view);
  m.impl("_reshape_alias", &simulated::reshape_alias);
  m.impl("unfold", &simulated::unfold);
  m.impl("resize_", &simulated::resize);
  m.impl("set_.source_Storage_storage_offset", &simulated::set_storage);
  // These have one kernel for all devices, which looks for one of the device's own further down.
  for (const char* name : {"copy_", "convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&simulated::run>());
}

TORCH_LIBRARY(simulated_gpu, m) {
  m.def("begin_recording() -> int", &simulated::begin_recording);
  m.def("recorded() -> int", &simulated::recorded);
  m.def("end_recording() -> ()", &simulated::end_recording);
  m.def("replay(int graph, int start, int stop) -> ()", &simulated::replay);
  m.def("drop_recording(int graph) -> ()", &simulated::drop_recording);
  m.def("live_bytes() -> int", [] { return simulated::live.load(); });
  m.def("peak_bytes() -> int", [] { return simulated::peak.load(); });
  m.def("reserved_bytes() -> int", [] { return simulated::reserved.load(); });
  m.def("give_back() -> ()", [] { simulated::reserved = simulated::live.load(); });
  m.def("reset_peak() -> ()", [] { simulated::peak = simulated::live.load(); });
  m.def("refuse_waits(bool on) -> ()", [](bool on) { simulated::refuses_waits = on; });
  m.def("on_host(Tensor tensor) -> Tensor",
        torch::dispatch(c10::DispatchKey::CUDA, TORCH_FN(simulated::on_host)));
  m.def("resize_storage(Tensor of, int bytes) -> ()",
        torch::dispatch(c10::DispatchKey::CUDA, TORCH_FN(simulated::resize_storage)));
}

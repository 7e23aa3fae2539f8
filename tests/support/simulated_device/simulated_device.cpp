#include <tessera/tests/support/simulated_device/simulated_device.h>

#include <tessera/collectives/backends/backend.h>
#include <tessera/tests/support/simulated_device/autocast.h>
#include <tessera/tests/support/simulated_device/boxed.h>
#include <tessera/tests/support/simulated_device/communicator.h>
#include <tessera/tests/support/simulated_device/device_guard.h>
#include <tessera/tests/support/simulated_device/hooks.h>
#include <tessera/tests/support/simulated_device/operators.h>

#include <c10/core/DeviceType.h>

#include <cstdlib>
#include <exception>
#include <utility>

namespace tessera::testing::sim {

namespace {

/// The threads of the streams must not run kernels while the process tears down what these use.
void drain() {
  try {
    Runtime::get().synchronize_all("exit");
  } catch (const std::exception&) { // nobody is left to be told
  }
}

c10::Stream stream_of(size_t id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, static_cast<c10::StreamId>(id)); }

bool register_all() {
  c10::register_privateuse1_backend("sim");
  at::RegisterPrivateUse1HooksInterface(new Hooks); // LibTorch keeps it
  static const c10::impl::DeviceGuardImplRegistrar guard(kDeviceType, new DeviceGuardImpl);
  c10::SetAllocator(kDeviceType, &CachingAllocator::get());
  register_operators();
  register_autocast();
  internal::register_backend(kDeviceType, {&make_communicator, [](int64_t) { return kDevice; }});
  std::atexit(drain);
  return true;
}

} // namespace

void enable() { static const bool once [[maybe_unused]] = register_all(); }

void configure(const Options& options) {
  auto& runtime = Runtime::get();
  runtime.set_delays(options.delays);
  runtime.time_line().set_model(options.time);
  CachingAllocator::get().set_poison(options.poison);
}

void synchronize() { Runtime::get().synchronize_all("device"); }

c10::Stream stream() { return stream_of(current_stream()); }
c10::Stream default_stream() { return stream_of(0); }

c10::Stream new_stream(const std::string& name) {
  const auto made = Runtime::get().make_stream();
  Runtime::get().name_stream(made, name);
  return stream_of(made);
}

void launch(const c10::Stream& stream, const std::string& name, const std::vector<at::Tensor>& reads,
            const std::vector<at::Tensor>& writes, std::function<void()> work, double modelled_us) {
  std::vector<Use> uses;
  for (const auto& tensor : reads) uses.push_back({Region::of(tensor), false});
  for (const auto& tensor : writes) uses.push_back({Region::of(tensor), true});
  Runtime::get().launch(static_cast<size_t>(stream.id()),
                        {name, std::move(uses), std::move(work), modelled_us, 1, Stream::Start::kNow});
}

at::Tensor cpu_alias(const at::Tensor& tensor) { return Aliases(c10::kCPU).of(tensor); }

Counters counters() { return Runtime::get().counters().read(); }
void reset_counters() { Runtime::get().counters().reset(); }
std::map<std::string, int64_t> races() { return Runtime::get().checker().races(); }
void reset_races() { Runtime::get().checker().reset(); }

} // namespace tessera::testing::sim

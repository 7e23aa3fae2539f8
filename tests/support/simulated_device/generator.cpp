#include <tessera/tests/support/simulated_device/generator.h>

#include <tessera/tests/support/simulated_device/caching_allocator.h>

#include <ATen/CPUGeneratorImpl.h>

#include <utility>

namespace tessera::testing::sim {

namespace {

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(at::Generator cpu)
      : GeneratorImpl(c10::Device(kDeviceType, 0), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu_(std::move(cpu)) {}

  const at::Generator& cpu() const { return cpu_; }
  at::Generator exchange_cpu(at::Generator cpu) { return std::exchange(cpu_, std::move(cpu)); }
  void set_current_seed(uint64_t seed) override { cpu_.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu_.set_offset(offset); }
  uint64_t get_offset() const override { return cpu_.get_offset(); }
  uint64_t current_seed() const override { return cpu_.current_seed(); }
  uint64_t seed() override { return cpu_.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu_.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu_.unsafeGetGeneratorImpl()->get_state(); }

 private:
  Generator* clone_impl() const override { return new Generator(cpu_.clone()); }

  at::Generator cpu_;
};

} // namespace

at::Generator cpu_generator_of(const at::Generator& generator) {
  return static_cast<const Generator*>(generator.unsafeGetGeneratorImpl())->cpu();
}

const at::Generator& default_generator() {
  static const auto* const made = new at::Generator(at::make_generator<Generator>(at::detail::getDefaultCPUGenerator()));
  return *made;
}

OwnNumbers::OwnNumbers() : cpu_(default_generator().get<Generator>()->exchange_cpu(at::detail::createCPUGenerator())) {}
OwnNumbers::~OwnNumbers() { default_generator().get<Generator>()->exchange_cpu(std::move(cpu_)); }

at::Generator make_generator() { return at::make_generator<Generator>(at::detail::createCPUGenerator()); }

} // namespace tessera::testing::sim

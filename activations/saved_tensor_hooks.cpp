#include <tessera/activations/saved_tensor_hooks.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>

#include <typeinfo>
#include <utility>

namespace tessera::internal {

namespace {

using torch::autograd::Engine;

thread_local SavedTensorTaker* current_taker = nullptr;

/// Autograd's own engine, which asks for hooks. LibTorch's own scopes of hooks hold Python objects.
class HookedEngine final : public Engine {
 public:
  HookedEngine() = default;
  ~HookedEngine() override { stop(); }
  HookedEngine(const HookedEngine&) = delete;
  HookedEngine& operator=(const HookedEngine&) = delete;

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return current_taker ? current_taker->take() : nullptr;
  }
};

Engine& hooked_engine() {
  static HookedEngine engine;
  return engine;
}

/// Before the first backward, whose threads belong to the engine. In a program that has loaded Python's engine, that one stays.
bool install() {
  const auto& before = Engine::get_default_engine();
  const bool is_own = typeid(before) == typeid(Engine);
  if (is_own) torch::autograd::set_default_engine_stub(&hooked_engine);
  return is_own;
}

// NOLINTNEXTLINE(cert-err58-cpp): as registrations with the dispatcher do
const bool kInstalled = install();

} // namespace

TakerScope::TakerScope(SavedTensorTaker* taker) : before_(std::exchange(current_taker, taker)) {
  if (kInstalled) return;
  current_taker = before_;
  TORCH_CHECK_NOT_IMPLEMENTED(false, "recompute and saved_tensors_in need LibTorch's own autograd engine, but this program has ",
                              "another one (Python's)");
}

TakerScope::~TakerScope() { current_taker = before_; }

} // namespace tessera::internal

#include <tessera/activations/saved_tensor_hooks.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <typeinfo>
#include <utility>
#include <vector>

#include <tessera/activations/explain_backward.h>
#include <tessera/base/per_thread.h>

namespace tessera::internal {

/// The scopes of a thread that are open, and their takers, by when they began.
struct OpenTakers {
  using Scope = std::pair<const TakerScope*, SavedTensorTaker*>;
  std::mutex mutex; ///< another thread may end a scope
  std::vector<Scope> scopes;

  auto position_of(const TakerScope* scope) { return std::ranges::find(scopes, scope, &Scope::first); }
};

namespace {

using torch::autograd::Engine;

constinit PerThread<std::shared_ptr<OpenTakers>> open_takers; // null until the thread's first scope

/// Autograd's own engine, which asks for hooks, and explains errors. LibTorch's own scopes of hooks hold Python objects.
class HookedEngine final : public Engine {
 public:
  HookedEngine() = default;
  ~HookedEngine() override { stop(); }
  HookedEngine(const HookedEngine&) = delete;
  HookedEngine& operator=(const HookedEngine&) = delete;

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    const auto& open = *open_takers;
    if (!open) return nullptr;
    const std::lock_guard lock(open->mutex);
    const auto& scopes = open->scopes;
    return scopes.empty() || !scopes.back().second ? nullptr : scopes.back().second->take();
  }

  void thread_on_exception(const std::shared_ptr<torch::autograd::GraphTask>& task,
                           const std::shared_ptr<torch::autograd::Node>& node, std::exception& error) override {
    explain_backward_error(node->name(), error);
    Engine::thread_on_exception(task, node, error);
  }
};

Engine& hooked_engine() {
  static HookedEngine engine;
  return engine;
}

/// Installs the engine before the first backward, whose threads belong to the engine. In a program that has loaded Python's
/// engine, that one stays.
bool install() {
  const auto& before = Engine::get_default_engine();
  const bool is_own = typeid(before) == typeid(Engine);
  if (is_own) torch::autograd::set_default_engine_stub(&hooked_engine);
  return is_own;
}

// NOLINTNEXTLINE(cert-err58-cpp): as registrations with the dispatcher do
const bool kInstalled = install();

} // namespace

TakerScope::TakerScope(SavedTensorTaker* taker) {
  TORCH_CHECK_NOT_IMPLEMENTED(kInstalled, "recompute and saved_tensors_in need LibTorch's own autograd engine, but this program ",
                              "has another one (Python's)");
  auto& open = *open_takers;
  if (!open) open = std::make_shared<OpenTakers>();
  open_ = open;
  const std::lock_guard lock(open_->mutex);
  open_->scopes.emplace_back(this, taker);
}

TakerScope::~TakerScope() {
  const std::lock_guard lock(open_->mutex);
  open_->scopes.erase(open_->position_of(this));
}

SavedTensorTaker* TakerScope::before() const {
  const std::lock_guard lock(open_->mutex);
  const auto own = open_->position_of(this);
  return own == open_->scopes.begin() ? nullptr : std::prev(own)->second;
}

} // namespace tessera::internal

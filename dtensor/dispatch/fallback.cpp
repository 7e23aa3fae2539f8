#include <tessera/dtensor/dispatch/fallback.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <torch/library.h>

#include <tessera/dtensor/api.h>
#include <tessera/dtensor/dispatch/plan_cache.h>
#include <tessera/dtensor/dtensor_impl.h>
#include <tessera/dtensor/redistribute/redistribute.h>

namespace tessera {

namespace {
thread_local int implicit_replication = 0;
}

ImplicitReplication::ImplicitReplication() { ++implicit_replication; }
ImplicitReplication::~ImplicitReplication() { --implicit_replication; }

namespace dispatch {

bool implicit_replication_enabled() { return implicit_replication > 0; }

namespace {

using torch::jit::Stack;

constexpr size_t kPlansPerGeneration = 4096;
thread_local PlanCache plans(kPlansPerGeneration);
thread_local uint64_t hits = 0, misses = 0;

/// Runs one planned call.
class Execution {
 public:
  Execution(const c10::OperatorHandle& op, const OpInfo& info, Plan& plan, Stack* stack)
      : op_(op), info_(info), plan_(plan), stack_(stack), begin_(stack->size() - info.arguments.size()) {}

  void run() {
    unwrap();
    c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                             c10::DispatchKeySet(kDTensorKey));
    if (!plan_.on_mesh) {
      skip();
    } else if (info_.rule->local) {
      info_.rule->local({op_, stack_, plan_.outputs, plan_.ran});
    } else {
      op_.callBoxed(stack_);
    }
    wrap();
  }

 private:
  void unwrap() {
    size_t input = 0;
    for (size_t i = 0; i < info_.arguments.size(); ++i) {
      auto& value = (*stack_)[begin_ + i];
      const auto& argument = info_.arguments[i];
      if (argument.kind == ArgKind::kTensor) {
        auto local = local_of(value, input++, argument.written);
        if (!local.defined()) continue;
        if (argument.written || (info_.views && !viewed_.defined())) keep(i, value);
        value = std::move(local);
      } else if (argument.kind == ArgKind::kTensorList && !value.isNone()) {
        value = locals_of(value, input, argument.written);
      }
    }
  }

  void keep(size_t i, c10::IValue& value) {
    if (info_.arguments[i].written) {
      written_.emplace_back(static_cast<int>(i), std::move(value));
    } else {
      viewed_ = value.toTensor();
    }
  }

  c10::IValue locals_of(const c10::IValue& value, size_t& input, bool written) {
    const auto elements = value.toListRef();
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& element : elements) {
        auto local = local_of(element, input++, written);
        list.push_back(local.defined() ? std::optional(std::move(local)) : std::nullopt);
      }
      return list;
    }
    c10::List<at::Tensor> list;
    list.reserve(elements.size());
    for (const auto& element : elements) list.push_back(local_of(element, input++, written));
    return list;
  }

  at::Tensor local_of(const c10::IValue& value, size_t input, bool written) {
    if (!value.isTensor()) return {};
    const auto& tensor = value.toTensor();
    auto* meta = dtensor_meta(tensor);
    const auto& plan = plan_.inputs[input];
    if (!meta) return plan.target ? redistribute_local(tensor, *plan.source, *plan.target, info_.name) : tensor;
    if (C10_UNLIKELY(meta->copied_at_version.has_value())) check_copy(tensor, *meta, written);
    return plan.target ? redistribute_local(tensor, *meta, plan.target, info_.name) : meta->local;
  }

  void check_copy(const at::Tensor& tensor, const DTensorMeta& meta, bool written) const {
    TORCH_CHECK(!written, info_.name,
                ": this view of a DTensor could not alias it, because its data had to move between ranks; "
                "writing into it would not reach the original. Its spec is ",
                meta.spec->to_string());
    TORCH_CHECK(
        tensor.is_inference() || tensor._version() == *meta.copied_at_version, info_.name,
        ": the DTensor behind this view was written after the view was taken, and the view could not alias it, because its data "
        "had to move between ranks. Take the view again; its spec is ",
        meta.spec->to_string());
  }

  void wrap() {
    const size_t count = info_.returns.size(), first = stack_->size() - count;
    size_t output = 0;
    for (size_t r = 0; r < count; ++r) {
      auto& value = (*stack_)[first + r];
      const auto& result = info_.returns[r];
      if (result.written_argument >= 0) {
        for (auto& [argument, original] : written_) {
          if (argument == result.written_argument) value = original;
        }
        ++output;
      } else if (value.isTensor()) {
        auto wrapped = wrap_one(value.toTensor(), output++);
        value = std::move(wrapped);
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        list.reserve(value.toListRef().size());
        for (const auto& element : value.toListRef()) list.push_back(wrap_one(element.toTensor(), output++));
        value = std::move(list);
      }
    }
  }

  at::Tensor wrap_one(const at::Tensor& local, size_t index) {
    if (!local.defined()) return local;
    TORCH_INTERNAL_ASSERT(index < plan_.outputs.size(), info_.name);
    auto& plan = plan_.outputs[index];
    if (!plan.spec || plan.spec->dtype() != local.scalar_type()) {
      plan.spec = Spec::intern(mesh(), plan.placements, plan.sizes, local.scalar_type(), plan.strides);
    }
    auto result = make_dtensor(local, plan.spec);
    if (plan_.moves_viewed && viewed_.defined() && !viewed_.is_inference()) {
      auto* impl = result.unsafeGetTensorImpl();
      impl->set_version_counter(viewed_.unsafeGetTensorImpl()->version_counter());
      dtensor_meta(result)->copied_at_version = static_cast<uint32_t>(viewed_._version());
    }
    return result;
  }

  const DeviceMesh& mesh() const {
    for (const auto& spec : plan_.ran) {
      if (spec) return spec->mesh();
    }
    TORCH_INTERNAL_ASSERT(false, info_.name, " has no DTensor argument");
  }

  /// A rank outside the mesh computes nothing.
  void skip() {
    stack_->resize(begin_);
    size_t output = 0;
    const auto empty = [&](size_t index) { return at::empty({0}, at::TensorOptions().dtype(plan_.outputs[index].dtype)); };
    for (size_t r = 0; r < info_.returns.size(); ++r) {
      if (op_.schema().returns()[r].type()->kind() == c10::TypeKind::ListType) {
        c10::List<at::Tensor> list;
        while (output < plan_.outputs.size()) list.push_back(empty(output++));
        stack_->emplace_back(std::move(list));
      } else {
        stack_->emplace_back(empty(output++));
      }
    }
  }

  const c10::OperatorHandle& op_;
  const OpInfo& info_;
  Plan& plan_;
  Stack* stack_;
  const size_t begin_;
  absl::InlinedVector<std::pair<int, c10::IValue>, 2> written_;
  at::Tensor viewed_;
};

[[noreturn]] void no_rule(const OpInfo& info, const Stack& stack, size_t begin) {
  std::string text;
  const DeviceMesh* mesh = nullptr;
  const auto visit = [&](const c10::IValue& value) {
    if (!value.isTensor()) return;
    const auto* meta = dtensor_meta(value.toTensor());
    if (!meta) return;
    mesh = &meta->spec->mesh();
    auto full = meta->spec->to_string();
    text += (text.empty() ? "" : ", ") + full.substr(0, full.rfind(" on "));
  };
  for (size_t i = begin; i < stack.size(); ++i) {
    if (stack[i].isTensor()) visit(stack[i]);
    if (stack[i].isTensorList()) {
      for (const auto& element : stack[i].toListRef()) visit(element);
    }
  }
  TORCH_CHECK(false, info.name, ": no sharding rule for this operator; arguments ", text, " on ",
              mesh ? mesh->to_string() : "no mesh", ". Redistribute to Replicate() and use to_local(), or full_tensor()");
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& info = op_info(op);
  const auto* rule = info.rule;
  if (C10_UNLIKELY(!rule || rule->handler || rule->decompose)) {
    if (rule && rule->handler) return rule->handler(op, stack);
    if (rule) return op.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
    if (info.decomposes) return op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
    no_rule(info, *stack, stack->size() - info.arguments.size());
  }
  const size_t begin = stack->size() - info.arguments.size();
  CallKey key;
  const bool cacheable = make_key(info, *stack, begin, key) == KeyState::kComplete;
  auto plan = cacheable ? plans.find(key) : nullptr;
  if (plan) {
    ++hits;
  } else {
    ++misses;
    plan = std::make_shared<Plan>(make_plan(op, info, *stack, begin));
    if (cacheable) plans.insert(key, plan);
  }
  Execution(op, info, *plan, stack).run();
}

} // namespace

CacheStatistics cache_statistics() { return {hits, misses, plans.size()}; }
void clear_cache() { plans.clear(); }

} // namespace dispatch
} // namespace tessera

TORCH_LIBRARY_IMPL(_, Fake, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&tessera::dispatch::run>()); }

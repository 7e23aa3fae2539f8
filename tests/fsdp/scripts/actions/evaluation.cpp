// Forwards without gradients, and reads of parameters outside a forward.
#include <c10/core/InferenceMode.h>
#include <c10/util/ScopeExit.h>
#include <tessera/fsdp/unsharded.h>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/pass.h>

#include <optional>
#include <vector>

namespace tessera::testing::scripts {
namespace {

void evaluate_without_grad(Turn& turn) {
  const torch::NoGradGuard no_grad;
  turn.side.record_mean(random_loss(turn));
}

void evaluate_in_inference_mode(Turn& turn) {
  const c10::InferenceMode inference;
  turn.side.record_mean(random_loss(turn));
}

/// As a discriminator is read for the generator's loss, perhaps between its own loss and the backward of that.
void evaluate_frozen(Turn& turn) {
  std::vector<Tensor> trained = turn.trainee.model->parameters();
  std::erase_if(trained, [](const Tensor& parameter) { return !parameter.requires_grad(); });
  const auto set = [&trained](bool trains) {
    for (auto& parameter : trained) parameter.requires_grad_(trains);
  };
  set(false);
  const auto unfreeze = c10::make_scope_exit([&set] { set(true); });
  turn.side.record_mean(random_loss(turn).detach());
}

struct Read {
  const char* name;
  std::function<Tensor(const Tensor&)> run;
};

const std::vector<Read>& reads() {
  static const std::vector<Read> all{
      {"itself", [](const Tensor& p) { return p; }},
      {"norm", [](const Tensor& p) { return p.norm(); }},
      {"sum", [](const Tensor& p) { return p.sum(); }},
      {"largest", [](const Tensor& p) { return p.abs().max(); }},
      {"largest of the first dim", [](const Tensor& p) { return p.dim() > 0 ? p.abs().amax(0) : p.abs(); }},
      {"clone", [](const Tensor& p) { return p.clone(); }},
      {"mean of detach", [](const Tensor& p) { return p.detach().abs().mean(); }},
      {"comparison", [](const Tensor& p) { return p.eq(p); }},
      {"transpose", [](const Tensor& p) { return p.dim() == 2 ? p.t().contiguous() : p.clone(); }},
      {"flattened", [](const Tensor& p) { return p.reshape({-1}).square(); }},
      {"views beside what is computed", [](const Tensor& p) { return p.view({-1}) * (p * 2).view({-1}); }},
      {"product of views", [](const Tensor& p) { return p.dim() == 2 ? p.t().mm(p.square()) : p.clone(); }},
      {"unsharded", [](const Tensor& p) { return tessera::unsharded(p).clone(); }},
      {"data", [](const Tensor& p) { return p.data() * 2; }},
      {"float", [](const Tensor& p) { return p.is_complex() ? p : p.to(torch::kFloat); }},
  };
  return all;
}

void read_parameter(Turn& turn) {
  const auto items = turn.trainee.model->named_parameters().items();
  const auto& item = turn.draw.of(items);
  const auto& read = turn.draw.of(reads());
  std::optional<torch::NoGradGuard> no_grad;
  if (turn.draw.chance(70)) no_grad.emplace();
  if (turn.trainee.policy) return; // a forward would read it in another dtype
  turn.note(c10::str("reads ", read.name, " of ", item.key(), no_grad ? " without grad mode" : ""));
  // What is computed in bfloat16 is too coarse to compare.
  if (item.value().numel() == 0 || item.value().scalar_type() == torch::kBFloat16) return;
  turn.side.record(read.run(item.value()));
}

void read_all_at_once(Turn& turn) {
  if (turn.trainee.policy) return; // a view is one of what a forward would read
  const torch::NoGradGuard no_grad;
  std::vector<Tensor> flat;
  for (const auto& parameter : turn.trainee.model->parameters()) {
    if (parameter.scalar_type() == torch::kDouble) flat.push_back(parameter.reshape({-1}));
  }
  turn.side.record(torch::cat(flat));
}

} // namespace

std::vector<Action> evaluation_actions() {
  return {{"evaluate without grad", 6, When::kAnywhere, evaluate_without_grad},
          {"evaluate in inference mode", 6, When::kAnywhere, evaluate_in_inference_mode},
          {"evaluate frozen", 5, When::kAnywhere, evaluate_frozen},
          {"read a parameter", 10, When::kAnywhere, read_parameter},
          {"read all at once", 1, When::kAnywhere, read_all_at_once}};
}

} // namespace tessera::testing::scripts

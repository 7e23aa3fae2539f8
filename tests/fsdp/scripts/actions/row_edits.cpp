// Edits of weights and gradients by statistics of their own rows and columns, in place: a shard may end inside a row.
#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/replay.h>

namespace tessera::testing::scripts {
namespace {

/// Changes `t`, of two dims or more; `other` has its shape and lies as it does.
struct RowEdit {
  const char* name;
  std::function<void(Tensor& t, const Tensor& other)> run;
};

const std::vector<RowEdit>& row_edits() {
  static const std::vector<RowEdit> all{
      {"centered rows", [](Tensor& t, const Tensor&) { t.sub_(t.mean(1, true), 0.3); }},
      {"centered columns", [](Tensor& t, const Tensor&) { t.sub_(t.mean(0, true), 0.3); }},
      {"divided rows", [](Tensor& t, const Tensor&) { t.div_(t.norm(2, -1, true) + 1); }},
      {"divided columns", [](Tensor& t, const Tensor&) { t.div_(t.norm(1, 0, true) + 1); }},
      {"max norm", [](Tensor& t, const Tensor&) { t.renorm_(2, 0, 0.7); }},
      {"max norm of columns", [](Tensor& t, const Tensor&) { t.renorm_(1, 1, 0.7); }},
      {"addcmul_", [](Tensor& t, const Tensor& other) { t.addcmul_(other, other.mean(1, true), 0.1); }},
      {"addcdiv_", [](Tensor& t, const Tensor& other) { t.addcdiv_(other, other.pow(2).sum(0, true) + 1, -0.1); }},
      {"lerp_", [](Tensor& t, const Tensor& other) { t.lerp_(other, (other * other).mean(-1, true).clamp_max(0.5)); }},
      {"a list",
       [](Tensor& t, const Tensor& other) {
         torch::_foreach_mul_({t, t}, {1 - other.mean(0, true), t.mean(1, true) + 1});
       }},
      {"added up", [](Tensor& t, const Tensor&) { t.cumsum_(1).mul_(0.3); }},
      {"triangle", [](Tensor& t, const Tensor&) { t.tril_(1); }},
      {"copied column", [](Tensor& t, const Tensor&) { t.copy_(t.sum(1, true) * 0.1); }},
  };
  return all;
}

/// Whether the rows are compared closely enough.
bool has_rows(const Tensor& tensor) { return tensor.dim() > 1 && tensor.numel() > 0 && tensor.scalar_type() == torch::kDouble; }

void edit_rows(Turn& turn, bool of_gradient) {
  const torch::NoGradGuard no_grad;
  const auto items = turn.trainee.model->named_parameters().items();
  const auto& item = turn.draw.of(items);
  const auto& edit = turn.draw.of(row_edits());
  auto edited = of_gradient ? item.value().grad() : item.value();
  if (!edited.defined() || !has_rows(edited) || Replay::from_environment().leaves_out(edit.name)) return;
  turn.note(c10::str(of_gradient ? "the gradient of " : "", item.key(), ' ', edited.sizes(), ": ", edit.name));
  edit.run(edited, edited.clone());
}

} // namespace

std::vector<Action> row_edit_actions() {
  return {{"edit rows of a weight", 5, When::kAnywhere, [](Turn& turn) { edit_rows(turn, false); }},
          {"edit rows of a gradient", 5, When::kReduced, [](Turn& turn) { edit_rows(turn, true); }}};
}

} // namespace tessera::testing::scripts

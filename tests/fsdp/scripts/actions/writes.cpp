// Writes to parameters, also through views of them, and to buffers.
#include <tessera/collectives/process_context.h>
#include <tessera/mesh/device_mesh.h>
#include <tessera/nn/average_buffers.h>

#include <tessera/tests/fsdp/scripts/action.h>
#include <tessera/tests/fsdp/scripts/pass.h>
#include <tessera/tests/fsdp/scripts/replay.h>
#include <tessera/tests/support/test_device.h>

#include <iterator>

namespace tessera::testing::scripts {
namespace {

/// A write to a parameter with elements; `values` has its shape and dtype, whole on every rank.
struct Write {
  const char* name;
  int64_t least_dims;
  std::function<void(const Tensor& p, const Tensor& values)> run;
};

std::vector<Write> whole_writes() {
  return {
      {"mul_", 0, [](const Tensor& p, const Tensor&) { p.mul_(0.5); }},
      {"copy_", 0, [](const Tensor& p, const Tensor& values) { p.copy_(values); }},
      {"constant_", 0, [](const Tensor& p, const Tensor&) { torch::nn::init::constant_(p, 0.25); }},
      {"eye_", 2,
       [](const Tensor& p, const Tensor&) {
         if (p.dim() == 2) torch::nn::init::eye_(p);
       }},
      {"data().mul_", 0, [](const Tensor& p, const Tensor&) { p.data().mul_(0.8); }},
      {"data().copy_", 0, [](const Tensor& p, const Tensor& values) { p.data().copy_(values); }},
      {"variable_data().mul_", 0, [](const Tensor& p, const Tensor&) { p.variable_data().mul_(0.7); }},
      {"detach().mul_", 0, [](const Tensor& p, const Tensor&) { p.detach().mul_(0.7); }},
      {"detach().copy_", 0, [](const Tensor& p, const Tensor& values) { p.detach().copy_(values); }},
      {"add_ of a like one", 0, [](const Tensor& p, const Tensor& values) { p.add_(laid_out_as(values, p), 0.1); }},
      {"lerp_ of a like one", 0, [](const Tensor& p, const Tensor& values) { p.lerp_(laid_out_as(values, p), 0.3); }},
      {"add_ of a replicated one", 0,
       [](const Tensor& p, const Tensor& values) {
         const ImplicitReplication replication;
         p.add_(values, 0.1);
       }},
  };
}

std::vector<Write> view_writes() {
  return {
      {"view().mul_", 0, [](const Tensor& p, const Tensor&) { p.view(p.sizes()).mul_(0.5); }},
      {"data().view(-1).mul_", 0, [](const Tensor& p, const Tensor&) { p.data().view({-1}).mul_(0.9); }},
      {"select().fill_", 1, [](const Tensor& p, const Tensor&) { p.select(0, -1).fill_(0.3); }},
      {"[0] =", 1, [](const Tensor& p, const Tensor&) { p[0] = 0.125; }},
      {"detach()[0].fill_", 1, [](const Tensor& p, const Tensor&) { p.detach()[0].fill_(0.2); }},
      {"data()[0].mul_", 1, [](const Tensor& p, const Tensor&) { p.data()[0].mul_(0.6); }},
      {"slice().mul_", 1, [](const Tensor& p, const Tensor&) { p.slice(0, 0, 1).mul_(1.5); }},
      {"slice().copy_", 1, [](const Tensor& p, const Tensor& values) { p.slice(0, 0, 2).copy_(values.slice(0, 0, 2)); }},
      {"t().mul_", 2, [](const Tensor& p, const Tensor&) { p.transpose(0, 1).mul_(0.6); }},
      {"diagonal().fill_", 2, [](const Tensor& p, const Tensor&) { p.diagonal().fill_(0.2); }},
      {"fill_diagonal_", 2,
       [](const Tensor& p, const Tensor&) {
         if (p.dim() == 2) p.fill_diagonal_(0.2);
       }},
  };
}

/// An index of a parameter's last row.
Tensor last_of(const Tensor& p) { return torch::tensor({p.size(0) - 1}).to(p.device()); }

std::vector<Write> index_writes() {
  return {
      {"index_put_", 1,
       [](const Tensor& p, const Tensor& values) {
         const auto device = is_dtensor(p) ? test_device() : p.device(); // also where the parameter is offloaded
         p.index_put_({torch::tensor({p.size(0) - 1, int64_t{0}}).to(device)}, values.slice(0, 0, 1).to(device));
       }},
      {"index_fill_", 1, [](const Tensor& p, const Tensor&) { p.index_fill_(0, last_of(p), 0.2); }},
      {"index_add_", 1, [](const Tensor& p, const Tensor& values) { p.index_add_(0, last_of(p), values.slice(0, 0, 1)); }},
      {"masked_fill_", 0,
       [](const Tensor& p, const Tensor& values) {
         p.masked_fill_((values.is_complex() ? torch::real(values) : values) > 0, 0.2);
       }},
  };
}

const std::vector<Write>& writes() {
  static const std::vector<Write> all = [] {
    std::vector<Write> joined;
    for (const auto& part : {whole_writes(), view_writes(), index_writes()})
      joined.insert(joined.end(), part.begin(), part.end());
    return joined;
  }();
  return all;
}

/// The backward of oneDNN's LSTM, which computes in float, reads the biases. That of steps in double does not.
bool only_float_reads_it_again(const Turn& turn, const std::string& name) {
  return turn.depth > 0 && turn.trainee.computes_in_float && name.find("lstm.bias") != std::string::npos;
}

void write_parameter(Turn& turn) {
  const torch::NoGradGuard no_grad;
  const auto items = turn.trainee.model->named_parameters().items();
  const auto& item = turn.draw.of(items);
  static const auto whole = whole_writes();
  const auto& write = turn.draw.of(turn.trainee.writes_views ? writes() : whole);
  const auto values = random_values(item.value(), turn.draw);
  if (item.value().dim() < write.least_dims || item.value().numel() == 0) return;
  if (Replay::from_environment().leaves_out(write.name) || only_float_reads_it_again(turn, item.key())) return;
  turn.note(c10::str(item.key(), ' ', item.value().sizes(), ": ", write.name));
  write.run(item.value(), values);
}

std::vector<Tensor> views_of(const Tensor& p) {
  std::vector<Tensor> views{p.view({-1}), p.view(p.sizes()), p.detach(), p.detach().view({-1}), p.data()};
  if (p.dim() > 0) views.insert(views.end(), {p[0], p.detach()[0], p.slice(0, 0, 2)});
  if (p.dim() > 1) views.insert(views.end(), {p.transpose(0, 1), p.data().transpose(0, 1)});
  return views;
}

/// A program keeps a view of a parameter, trains, and writes it.
void write_through_a_kept_view(Turn& turn) {
  const auto items = turn.trainee.model->named_parameters().items();
  const auto& item = turn.draw.of(items);
  const auto views_draw = turn.draw.below(10);
  const bool steps = turn.draw.chance(50), adds = turn.draw.chance(50);
  const auto& p = item.value();
  if (p.numel() == 0 || !turn.trainee.writes_views) return;
  Tensor view;
  {
    const torch::NoGradGuard no_grad;
    const auto views = views_of(p);
    view = views[static_cast<size_t>(views_draw) % views.size()];
    turn.note(c10::str("keeps view ", static_cast<size_t>(views_draw) % views.size(), " of ", item.key(), ' ', p.sizes()));
  }
  const auto loss = random_loss(turn);
  turn.side.record_mean(loss);
  backward(loss);
  if (steps) turn.trainee.optimizer->step();
  const torch::NoGradGuard no_grad;
  adds ? view.add_(0.05) : view.mul_(0.7);
  turn.side.record_mean(random_loss(turn));
  if (p.scalar_type() != torch::kBFloat16) turn.side.record(view.detach() * 1.0);
}

/// From the other model, which may be laid out in another way.
void copy_parameters(Turn& turn) {
  const torch::NoGradGuard no_grad;
  const auto parameter = turn.draw.of(turn.trainee.model->parameters());
  for (const auto& source : turn.other.model->parameters()) {
    if (source.sizes() != parameter.sizes() || source.scalar_type() != parameter.scalar_type()) continue;
    parameter.copy_(whole(source));
    return;
  }
}

/// Those that an action may write. Between a forward and its backward they leave out running statistics: LibTorch's BatchNorm
/// saves them for its backward, which needs them in evaluation alone, and one over all ranks does not.
std::vector<Tensor> buffers_to_write(const Turn& turn) {
  if (turn.depth == 0) return turn.trainee.model->buffers();
  std::vector<Tensor> buffers;
  for (const auto& item : turn.trainee.model->named_buffers()) {
    if (item.key().find("running_") == std::string::npos) buffers.push_back(item.value());
  }
  return buffers;
}

void write_buffers(Turn& turn) {
  const torch::NoGradGuard no_grad;
  for (const auto& buffer : buffers_to_write(turn)) buffer.mul_(0.5);
}

/// Ranks that have drifted apart, around the value of the unsharded side, take the mean, or those of the first rank.
void average_all_buffers(Turn& turn) {
  const torch::NoGradGuard no_grad;
  auto& model = *turn.trainee.model;
  const auto& context = process_context();
  const bool averages = turn.draw.chance(70);
  const double middle = averages ? (context.world_size() - 1) / 2.0 : 0;
  const double drift = turn.side.sharded ? context.rank() - middle : 0;
  for (const auto& buffer : model.buffers()) {
    if (buffer.is_floating_point()) buffer.add_(drift);
  }
  if (!turn.side.sharded) return;
  const auto mesh = init_device_mesh(test_device_type(), {context.world_size()});
  averages ? average_buffers(model, mesh) : broadcast_buffers(model, mesh);
}

} // namespace

std::vector<Action> write_actions() {
  return {{"write", 14, When::kAnywhere, write_parameter},
          {"write through a kept view", 5, When::kReduced, write_through_a_kept_view},
          {"copy from the other", 4, When::kAnywhere, copy_parameters},
          {"write buffers", 3, When::kAnywhere, write_buffers},
          {"average the buffers", 2, When::kBetweenSteps, average_all_buffers}};
}

} // namespace tessera::testing::scripts

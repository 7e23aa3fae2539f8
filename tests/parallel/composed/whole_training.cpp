// The training of one process.
#include <tessera/fsdp/clip_grad.h>

#include <tessera/tests/parallel/composed/composed_training.h>
#include <tessera/tests/parallel/composed/training_parts.h>

namespace tessera::testing::composed {

namespace {

class WholeTraining final : public Training {
 public:
  WholeTraining(const Task& task, const Manner& manner)
      : Training(task),
        shape_(manner.shape),
        net_(make_net(task.net, task.seed)),
        optimizer_(make_optimizer(net_->parameters(), task.adamw())) {
    if (task.averages) average_.emplace(*net_, ema(0.7));
  }

  void step(const StepPlan& plan) override {
    optimizer_->zero_grad();
    std::vector<Batch> all;
    for (int64_t call = 0; call < plan.calls; ++call) {
      take(plan.seed + static_cast<uint64_t>(call), plan.micro_batches, all);
      if (plan.evaluates && call > 0) evaluate(plan.seed + 5000, plan.micro_batches);
    }
    const auto loss = loss_of(all, /*trains=*/true);
    if (plan.nan_block < 0) numbers.push_back(loss);
    if (task_.max_norm > 0 && !plan.is_skipped())
      numbers.push_back(clip_grad_norm_(net_->parameters(), task_.max_norm).item<double>());
    if (task_.net.experts > 0) update_expert_bias(*net_);
    if (!plan.is_skipped()) optimizer_->step();
    if (average_) average_->update_parameters(*net_);
  }
  void evaluate(uint64_t seed, int64_t micro_batches) override {
    const torch::NoGradGuard no_grad;
    std::optional<AveragedWeights> averages;
    if (average_ && average_->n_averaged() > 0) averages.emplace(*average_, *net_);
    std::vector<Batch> all;
    take(seed, micro_batches, all);
    net_->eval();
    numbers.push_back(loss_of(all, /*trains=*/false));
    net_->train();
  }
  void resume(const Manner& manner, const std::filesystem::path&) override { shape_ = manner.shape; }
  void freeze(const std::string& part, bool trains) override { freeze_in(*net_, part, trains); }
  std::map<std::string, torch::Tensor> weights() override {
    std::map<std::string, torch::Tensor> all;
    add_weights(*net_, "", all);
    if (!average_) return all;
    const AveragedWeights averages(*average_, *net_);
    add_weights(*net_, "average.", all);
    return all;
  }

 private:
  void take(uint64_t seed, int64_t micro_batches, std::vector<Batch>& all) const {
    for (int64_t rank = 0; rank < shape_.data_ranks(); ++rank) {
      for (int64_t i = 0; i < micro_batches; ++i) all.push_back(draw_batch(task_.net, seed, rank, i));
    }
  }
  double loss_of(const std::vector<Batch>& all, bool trains) {
    double count = 0, sum = 0;
    for (const auto& batch : all) count += counted(batch);
    for (const auto& batch : all) {
      const auto loss = summed_loss(net_->forward(batch), batch);
      if (trains) (loss / count).backward();
      sum += loss.item<double>();
    }
    return sum / count;
  }

  Shape shape_;
  Net net_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::optional<AveragedModel> average_;
};

} // namespace

std::unique_ptr<Training> make_whole(const Task& task, const Manner& manner) {
  return std::make_unique<WholeTraining>(task, manner);
}

} // namespace tessera::testing::composed

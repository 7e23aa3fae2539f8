#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../support/lion.h"
#include "sharded_training.h"

namespace tessera::testing {

/// A training whose optimizers are no single one of LibTorch's with a state for each parameter. All of them compute in double.
class OwnTraining {
 public:
  virtual ~OwnTraining() = default;
  /// The mean loss over the ranks.
  virtual double step(int64_t number) = 0;
  virtual StateDict state(const StateDictOptions& options = {}) = 0;
};

/// A class of the test's own.
class LionTraining : public OwnTraining {
 public:
  LionTraining(const std::string& sharding, uint64_t seed)
      : strategy_(sharding), model_(seed), optimizer_(Training::parameters_of(model_), options()) {
    register_lion();
    shard(model_, strategy_);
  }
  double step(int64_t number) override { return train_step(model_, optimizer_, strategy_, number); }
  StateDict state(const StateDictOptions& options) override { return state_dict(model_, optimizer_, options); }

 private:
  static LionOptions options() {
    LionOptions options(0.01);
    options.weight_decay = 0.1;
    return options;
  }

  std::string strategy_;
  TrainedModel model_;
  Lion optimizer_;
};

/// Lion over the matrices, AdamW over the rest.
class LionAndAdamW : public OwnTraining {
 public:
  LionAndAdamW(const std::string& sharding, uint64_t seed)
      : strategy_(sharding),
        model_(seed),
        lion_(parameters(model_, true), LionOptions(0.01)),
        adamw_(parameters(model_, false), torch::optim::AdamWOptions(0.01)) {
    register_lion();
    shard(model_, strategy_);
  }
  double step(int64_t number) override {
    lion_.zero_grad();
    adamw_.zero_grad();
    const auto loss = loss_of(model_, strategy_, number);
    loss.backward();
    lion_.step();
    adamw_.step();
    return mean_loss_over_ranks(loss);
  }
  StateDict state(const StateDictOptions& options) override {
    return state_dict(model_, {{"lion", lion_}, {"adamw", adamw_}}, options);
  }

 private:
  static std::vector<at::Tensor> parameters(TrainedModel& model, bool matrices) {
    std::vector<at::Tensor> chosen;
    for (const auto& parameter : Training::parameters_of(model)) {
      if ((parameter.dim() == 2) == matrices) chosen.push_back(parameter);
    }
    return chosen;
  }

  std::string strategy_;
  TrainedModel model_;
  Lion lion_;
  torch::optim::AdamW adamw_;
};

/// The same batch in every step, as a line search needs it.
class LbfgsTraining : public OwnTraining {
 public:
  LbfgsTraining(const std::string& sharding, uint64_t seed)
      : strategy_(sharding),
        model_(seed),
        optimizer_(Training::parameters_of(model_),
                   torch::optim::LBFGSOptions(0.5).max_iter(4).history_size(3).line_search_fn("strong_wolfe")) {
    shard(model_, strategy_);
  }
  double step(int64_t /*number*/) override {
    const auto loss = optimizer_.step([&] {
      optimizer_.zero_grad();
      const auto part = loss_of(model_, strategy_, 0);
      part.backward();
      return torch::tensor(mean_loss_over_ranks(part), torch::kDouble); // it decides where the search ends: the same on all ranks
    });
    return loss.item<double>();
  }
  StateDict state(const StateDictOptions& options) override { return state_dict(model_, optimizer_, options); }

 private:
  std::string strategy_;
  TrainedModel model_;
  torch::optim::LBFGS optimizer_;
};

/// A generator and a discriminator that are trained in turns, each with an optimizer of another class.
class GanTraining : public OwnTraining {
 public:
  GanTraining(const std::string& sharding, uint64_t seed) : strategy_(sharding) {
    torch::manual_seed(seed);
    generator_ = perceptron(4, 2);
    discriminator_ = perceptron(2, 1);
    generator_steps_ = std::make_unique<torch::optim::Adam>(generator_->parameters(),
                                                            torch::optim::AdamOptions(0.01).betas({0.5, 0.9}).eps(1e-4));
    discriminator_steps_ =
        std::make_unique<torch::optim::RMSprop>(discriminator_->parameters(), torch::optim::RMSpropOptions(0.005).eps(1e-4));
    shard(*generator_, {generator_->ptr(0)}, strategy_);
    shard(*discriminator_, {discriminator_->ptr(0)}, strategy_);
  }
  double step(int64_t number) override {
    const auto device = generator_->parameters()[0].device();
    const auto noise = rows_of(random({12, 4}, number), strategy_).to(device),
               angle = 3 * rows_of(random({12}, 500 + number), strategy_).to(device);
    const auto real = torch::stack({angle.cos(), angle.sin()}, 1), made = generator_->forward(noise);
    discriminator_steps_->zero_grad();
    const auto telling =
        torch::softplus(-discriminator_->forward(real)).mean() + torch::softplus(discriminator_->forward(made.detach())).mean();
    telling.backward();
    discriminator_steps_->step();
    generator_steps_->zero_grad();
    discriminator_steps_->zero_grad();
    const auto fooling = torch::softplus(-discriminator_->forward(made)).mean();
    fooling.backward();
    generator_steps_->step();
    return mean_loss_over_ranks(telling.detach() + fooling.detach());
  }
  StateDict state(const StateDictOptions& options) override {
    auto first = options, second = options;
    first.prefix = "generator.";
    second.prefix = "discriminator.";
    auto state = state_dict(*generator_, {{"generator", *generator_steps_}}, first);
    state.merge(state_dict(*discriminator_, {{"discriminator", *discriminator_steps_}}, second));
    return state;
  }

 private:
  static torch::nn::Sequential perceptron(int64_t inputs, int64_t outputs) {
    return torch::nn::Sequential(torch::nn::Linear(inputs, 9), torch::nn::Tanh(), torch::nn::Linear(9, outputs));
  }
  static at::Tensor random(at::IntArrayRef sizes, int64_t number) {
    return torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(1000 + number)));
  }

  std::string strategy_;
  torch::nn::Sequential generator_{nullptr}, discriminator_{nullptr};
  std::unique_ptr<torch::optim::Optimizer> generator_steps_, discriminator_steps_;
};

inline std::vector<std::string> own_trainings() { return {"Lion", "LionAndAdamW", "Lbfgs", "Gan"}; }

/// torch's default dtype must be double.
inline std::unique_ptr<OwnTraining> make_training(const std::string& name, const std::string& strategy, uint64_t seed) {
  if (name == "Lion") return std::make_unique<LionTraining>(strategy, seed);
  if (name == "LionAndAdamW") return std::make_unique<LionAndAdamW>(strategy, seed);
  if (name == "Lbfgs") return std::make_unique<LbfgsTraining>(strategy, seed);
  TORCH_CHECK(name == "Gan", "no training ", name);
  return std::make_unique<GanTraining>(strategy, seed);
}

} // namespace tessera::testing

// The rules of optimizers that reduce in one bit an element, beside a reference of all ranks, one number after another.
#include <gtest/gtest.h>
#include <tessera/collectives/process_context.h>
#include <tessera/dtensor/api.h>
#include <tessera/optim/one_bit.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <tessera/optim/parts/one_bit_reduction.h>

#include <tessera/tests/fsdp/sharded_model.h>

namespace tessera::testing::one_bit_rules_test {
namespace {

using Numbers = std::vector<double>;

double norm(const Numbers& numbers) {
  double sum = 0;
  for (const double each : numbers) sum += each * each;
  return std::sqrt(sum);
}

/// Signs times a size, and what is left in `error`.
Numbers compressed(const Numbers& values, Numbers& error) {
  Numbers sum(values.size());
  for (size_t i = 0; i < values.size(); ++i) sum[i] = values[i] + error[i];
  const double size = norm(sum) / std::sqrt(static_cast<double>(std::max<size_t>(sum.size(), 1)));
  Numbers sent(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    sent[i] = sum[i] >= 0 ? size : -size;
    error[i] = sum[i] - sent[i];
  }
  return sent;
}

/// The reduction of one tensor by all ranks.
class Reduction {
 public:
  Reduction(size_t size, size_t ranks) : worker_(ranks, Numbers(size)) {
    const auto part = static_cast<size_t>(internal::one_bit_part(static_cast<int64_t>(size), static_cast<int64_t>(ranks)));
    for (size_t first = 0, rank = 0; rank < ranks; ++rank, first = std::min(first + part, size))
      server_.emplace_back(std::min(part, size - first));
  }
  Numbers mean(const std::vector<Numbers>& values) {
    if (values.size() == 1) return values[0];
    std::vector<Numbers> sent;
    for (size_t rank = 0; rank < values.size(); ++rank) sent.push_back(compressed(values[rank], worker_[rank]));
    Numbers result;
    for (auto& error : server_) {
      Numbers part(error.size());
      for (size_t i = 0; i < part.size(); ++i) {
        for (const auto& each : sent) part[i] += each[result.size() + i] / static_cast<double>(sent.size());
      }
      const auto common = compressed(part, error);
      result.insert(result.end(), common.begin(), common.end());
    }
    return result;
  }
  void forget() {
    for (auto* list : {&worker_, &server_}) {
      for (auto& each : *list) std::fill(each.begin(), each.end(), 0.0);
    }
  }

 private:
  std::vector<Numbers> worker_, server_;
};

Numbers mean_of(const std::vector<Numbers>& values) {
  Numbers mean(values[0].size());
  for (const auto& each : values) {
    for (size_t i = 0; i < mean.size(); ++i) mean[i] += each[i] / static_cast<double>(values.size());
  }
  return mean;
}

/// What a rule takes: the parameter, and the gradients of the ranks.
using Rule = std::function<void(Numbers& w, const std::vector<Numbers>& gradients)>;

const std::vector<std::vector<int64_t>> kShapes{{}, {7}, {5, 9}, {64}, {33, 8}, {0}};

at::Tensor gradient_of(int64_t step, size_t parameter, int64_t rank, c10::IntArrayRef sizes) {
  const auto generator =
      at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(step * 1000 + static_cast<int64_t>(parameter) * 10 + rank));
  auto gradient = torch::randn(sizes, generator, torch::kDouble);
  if (sizes.size() == 2 && sizes[0] > 1) gradient[1].zero_(); // a row that is never used
  return gradient;
}

Numbers numbers_of(const at::Tensor& tensor) {
  const auto flat = tensor.detach().to(torch::kDouble).contiguous();
  return {flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel()};
}

DTensor on_all(const at::Tensor& tensor, const Placement& placement) {
  const auto mesh = world_mesh();
  return from_local(tensor.to(mesh.device()), mesh, {placement});
}

void set_gradients(const std::vector<at::Tensor>& parameters, int64_t step) {
  for (size_t i = 0; i < parameters.size(); ++i)
    parameters[i].mutable_grad() = on_all(gradient_of(step, i, world_rank(), parameters[i].sizes()), Partial{Partial::Op::kAvg});
}

void expect_as(const std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<at::Tensor>&)>& make,
               const std::function<Rule(size_t)>& rule_for, int64_t steps) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{11});
  std::vector<at::Tensor> parameters;
  std::vector<Numbers> expected;
  std::vector<Rule> rules;
  for (const auto& shape : kShapes) {
    const auto values = torch::randn(shape, generator, torch::kDouble);
    parameters.push_back(on_all(values, Replicate{}).detach().requires_grad_());
    expected.push_back(numbers_of(values));
    rules.push_back(rule_for(expected.back().size()));
  }
  const auto optimizer = make(parameters);
  for (int64_t step = 1; step <= steps; ++step) {
    set_gradients(parameters, step);
    for (size_t i = 0; i < parameters.size(); ++i) {
      std::vector<Numbers> gradients;
      for (int64_t rank = 0; rank < world_size(); ++rank)
        gradients.push_back(numbers_of(gradient_of(step, i, rank, parameters[i].sizes())));
      rules[i](expected[i], gradients);
    }
    optimizer->step();
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto got = numbers_of(full(parameters[i]));
    for (size_t k = 0; k < got.size(); ++k) EXPECT_NEAR(got[k], expected[i][k], 1e-8) << parameters[i].sizes() << " at " << k;
  }
}

constexpr double kEps = 1e-8, kLr = 0.01, kDecay = 0.1;

/// Momentum with the own gradient of each rank.
std::vector<Numbers> own_momenta(const Numbers& m, const std::vector<Numbers>& gradients) {
  std::vector<Numbers> own(gradients.size(), m);
  for (size_t rank = 0; rank < own.size(); ++rank) {
    for (size_t i = 0; i < m.size(); ++i) own[rank][i] = 0.9 * m[i] + 0.1 * gradients[rank][i];
  }
  return own;
}

TEST(OneBitAdam, IsThePapers) {
  static constexpr int64_t kFreeze = 5;
  const auto rule = [=](size_t size) -> Rule {
    auto reduction = std::make_shared<Reduction>(size, world_size());
    return
        [=, m = Numbers(size), v = Numbers(size), step = int64_t{0}](Numbers& w, const std::vector<Numbers>& gradients) mutable {
          if (++step <= kFreeze) {
            const auto g = mean_of(gradients);
            for (size_t i = 0; i < size; ++i) {
              m[i] = 0.9 * m[i] + 0.1 * g[i];
              v[i] = 0.999 * v[i] + 0.001 * g[i] * g[i];
            }
          } else {
            std::vector<Numbers> own(gradients.size(), m);
            for (size_t rank = 0; rank < own.size(); ++rank) {
              for (size_t i = 0; i < size; ++i) own[rank][i] = 0.9 * m[i] + 0.1 * gradients[rank][i];
            }
            m = reduction->mean(own);
            for (size_t i = 0; i < size; ++i) m[i] = v[i] == 0 ? 0 : m[i];
          }
          for (size_t i = 0; i < size; ++i) w[i] -= kLr * (m[i] / (std::sqrt(v[i]) + kEps) + kDecay * w[i]);
        };
  };
  expect_as(
      [](const auto& parameters) {
        return std::make_unique<OneBitAdam>(parameters, OneBitAdamOptions(kLr).weight_decay(kDecay).freeze_step(kFreeze));
      },
      rule, 50);
}

/// 1-bit LAMB of one parameter, as the paper and DeepSpeed have it.
struct LambReference {
  explicit LambReference(size_t size) : reduction(size, static_cast<size_t>(world_size())), m(size), v(size) {}

  void step(Numbers& w, const std::vector<Numbers>& gradients) {
    const double coeff = ++steps <= kFreeze ? warm_up(w, mean_of(gradients)) : frozen_step(w, gradients);
    for (size_t i = 0; i < w.size(); ++i) w[i] -= kLr * coeff * update[i];
  }

  void aim(const Numbers& w) {
    direction.resize(w.size());
    update.resize(w.size());
    for (size_t i = 0; i < w.size(); ++i) {
      direction[i] = m[i] / (std::sqrt(v[i]) + kEps);
      update[i] = direction[i] + kDecay * w[i];
    }
  }
  double warm_up(const Numbers& w, const Numbers& g) {
    for (size_t i = 0; i < g.size(); ++i) {
      m[i] = 0.9 * m[i] + 0.1 * g[i];
      v[i] = 0.999 * v[i] + 0.001 * g[i] * g[i];
    }
    aim(w);
    const bool has_norms = norm(w) > 0 && norm(update) > 0;
    const double coeff = has_norms ? std::clamp(norm(w) / norm(update), 0.01, 10.0) : 1;
    if (coeff != 1) frozen = 0.9 * frozen + 0.1 * coeff;
    return coeff;
  }
  double frozen_step(const Numbers& w, const std::vector<Numbers>& gradients) {
    if (fresh.empty()) fresh = v;
    const auto before = m;
    m = reduction.mean(own_momenta(m, gradients));
    double factor = 0;
    for (size_t i = 0; i < m.size(); ++i) {
      m[i] = v[i] == 0 ? 0 : m[i];
      const double g = (m[i] - 0.9 * before[i]) / (1 - 0.9);
      fresh[i] = 0.999 * fresh[i] + 0.001 * g * g;
      factor = std::max(factor, (std::sqrt(v[i]) + kEps) / (std::sqrt(fresh[i]) + kEps));
    }
    aim(w);
    const double ratio = norm(update) > 0 ? std::min(1.0, norm(direction) / norm(update)) : 1;
    factor = std::clamp(factor * ratio + (1 - ratio), 0.5, 4.0);
    last = std::clamp(factor, last * 0.9, last * 1.1);
    return frozen * last;
  }

  static constexpr int64_t kFreeze = 5;
  Reduction reduction;
  Numbers m, v, fresh, direction, update;
  int64_t steps = 0;
  double frozen = 0, last = 1;
};

TEST(OneBitLamb, IsThePapers) {
  expect_as(
      [](const auto& parameters) {
        return std::make_unique<OneBitLamb>(parameters, OneBitLambOptions(kLr).weight_decay(kDecay).freeze_step(5));
      },
      [](size_t size) -> Rule {
        return [reference = LambReference(size)](Numbers& w, const std::vector<Numbers>& gradients) mutable {
          reference.step(w, gradients);
        };
      },
      50);
}

/// 0/1 Adam of one parameter on all ranks.
struct ZeroOneReference {
  explicit ZeroOneReference(size_t size)
      : ranks(static_cast<size_t>(world_size())),
        reduction(size, ranks),
        m(ranks, Numbers(size)),
        moved(ranks, Numbers(size)),
        v(size) {}

  void step(Numbers& w, const std::vector<Numbers>& gradients) {
    if (own.empty()) own.assign(ranks, w);
    ++steps;
    const bool is_whole = !frozen && steps % interval == 0;
    auto used = gradients;
    if (!frozen) used.assign(ranks, is_whole ? mean_of(gradients) : reduction.mean(gradients));
    for (size_t i = 0; is_whole && i < v.size(); ++i) v[i] = 0.999 * v[i] + 0.001 * used[0][i] * used[0][i];
    for (size_t rank = 0; rank < ranks; ++rank) move(rank, used[rank]);
    if (frozen) lr_sum += kLr;
    if (frozen && steps % local == 0) join();
    plan(is_whole);
    w = own[0];
  }

  double root(size_t i) const { return std::sqrt(v[i]) + kEps; }
  void move(size_t rank, const Numbers& gradient) {
    for (size_t i = 0; i < gradient.size(); ++i) {
      m[rank][i] = 0.9 * m[rank][i] + 0.1 * gradient[i];
      const double update = (frozen && v[i] == 0 ? 0 : m[rank][i] / root(i)) + kDecay * own[rank][i];
      own[rank][i] -= kLr * update;
      if (frozen) moved[rank][i] -= kLr * update;
    }
  }
  void join() {
    auto sent = moved;
    for (auto& each : sent) {
      for (size_t i = 0; i < each.size(); ++i) each[i] *= root(i);
    }
    const auto mean = reduction.mean(sent);
    for (size_t rank = 0; rank < ranks; ++rank) {
      for (size_t i = 0; i < mean.size(); ++i) {
        const double common = v[i] == 0 ? 0 : mean[i];
        m[rank][i] = -common / lr_sum;
        own[rank][i] += common / root(i) - std::exchange(moved[rank][i], 0);
      }
    }
    lr_sum = 0;
  }
  void plan(bool was_whole) {
    if (frozen && ++local_counter == 6) {
      local_counter = 0;
      local = std::min<int64_t>(local * 2, 4);
    }
    if (was_whole && ++counter == 3) {
      counter = 0;
      interval *= 2;
    }
    if (frozen || steps < 20) return;
    frozen = true;
    reduction.forget();
  }

  size_t ranks;
  Reduction reduction;
  std::vector<Numbers> m, moved, own;
  Numbers v;
  int64_t steps = 0, interval = 1, counter = 0, local = 1, local_counter = 0;
  double lr_sum = 0;
  bool frozen = false;
};

TEST(ZeroOneAdam, IsThePapers) {
  const auto options = ZeroOneAdamOptions(kLr).weight_decay(kDecay).var_freeze_step(20).var_update_scaler(3);
  expect_as(
      [&](const auto& parameters) {
        return std::make_unique<ZeroOneAdam>(parameters, ZeroOneAdamOptions(options).local_step_scaler(6).local_step_clipper(4));
      },
      [](size_t size) -> Rule {
        return [reference = ZeroOneReference(size)](Numbers& w, const std::vector<Numbers>& gradients) mutable {
          reference.step(w, gradients);
        };
      },
      52);
}

TEST(OneBitMean, SendsAndKeepsWhatCameIn) {
  for (const auto dtype : {torch::kFloat, torch::kDouble}) {
    for (const int64_t size : {0, 1, 7, 8, 63, 64, 65, 1000}) {
      SCOPED_TRACE(size);
      if (world_size() == 1) continue;
      const auto communicator = init_device_mesh(torch::kCPU, {world_size()}).communicator();
      const auto worker = torch::zeros({size}, dtype), server = torch::zeros({internal::one_bit_part(size, world_size())}, dtype);
      auto came_in = torch::zeros({size}, torch::kDouble), sent = came_in.clone();
      for (int64_t round = 0; round < 5; ++round) {
        std::vector<at::Tensor> all;
        for (int64_t rank = 0; rank < world_size(); ++rank) all.push_back(gradient_of(round, 3, rank, {size}).to(dtype));
        auto values = all[world_rank()].clone();
        internal::one_bit_mean({{values, worker, server}}, *communicator, "a test");
        for (const auto& each : all) came_in += each.to(torch::kDouble) / world_size();
        sent += values.to(torch::kDouble);
      }
      auto left = worker.to(torch::kDouble) / world_size();
      const auto part = server.size(0);
      const auto first = std::min(world_rank() * part, size), count = std::min(part, size - first);
      left.narrow(0, first, count).add_(server.narrow(0, 0, count));
      communicator->all_reduce(left, ReduceOp::kSum, "what is left").wait();
      EXPECT_TRUE(torch::allclose(sent + left, came_in, 1e-5, dtype == torch::kFloat ? 1e-5 : 1e-12));
    }
  }
}

} // namespace
} // namespace tessera::testing::one_bit_rules_test

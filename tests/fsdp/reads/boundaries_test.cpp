// The dtype of each tensor under a mixed precision policy: the table of docs/mixed_precision.md.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <tessera/activations/recompute.h>
#include <tessera/fsdp/call.h>
#include <tessera/fsdp/no_sync.h>
#include <tessera/fsdp/unsharded.h>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::boundaries_test {
namespace {

using torch::Tensor;

struct Warnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;
};

/// The warnings on the first rank; the others give none.
std::vector<std::string> warnings_of(const std::function<void()>& run) {
  Warnings warnings;
  {
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    run();
  }
  if (world_rank() != 0) EXPECT_THAT(warnings.texts, ::testing::IsEmpty());
  return warnings.texts;
}

/// Every dtype of the policy is another one, so that a tensor's says where it comes from.
FullyShardOptions four_dtypes(bool casts_inputs) {
  FullyShardOptions options;
  options.mixed_precision.param_dtype = torch::kBFloat16;
  options.mixed_precision.reduce_dtype = torch::kDouble;
  options.mixed_precision.output_dtype = torch::kHalf;
  options.mixed_precision.cast_forward_inputs = casts_inputs;
  options.mixed_precision.keep_in_fp32 = {"kept"};
  return options;
}

std::string name_of(torch::ScalarType dtype) {
  static const std::map<torch::ScalarType, std::string> names{{torch::kBFloat16, "`param_dtype`"},
                                                              {torch::kDouble, "`reduce_dtype`"},
                                                              {torch::kHalf, "`output_dtype`"},
                                                              {torch::kFloat, "own"},
                                                              {torch::kLong, "own"}};
  return names.at(dtype);
}

using Seen = std::map<std::string, std::string>;

struct Probe : torch::nn::Module {
  Tensor forward(const Tensor& x, const Tensor& index) {
    note(prefix + "floating-point input, in forward", x);
    const auto wide = torch::ones({4}, x.device()), wide_matrix = torch::ones({2, 4}, x.device());
    const auto on_wide = [&] { return wide_matrix.matmul(linear->weight); };
    if (!prefix.empty()) {
      note(prefix + "result of a product with a parameter, on a wider tensor", wide * scale);
      seen[prefix + "result of a matrix product with a parameter, on a wider tensor"] =
          error_of(on_wide).find("dtype") == std::string::npos ? "no error" : "error";
      return linear(x.to(torch::kBFloat16)) * scale * kept;
    }
    note("integer input, in forward", index);
    note("buffer", table);
    note("parameter that forward reads", unsharded(scale));
    seen["parameter that `keep_in_fp32` names"] = c10::toString(unsharded(kept).scalar_type());
    note("result of an operator without a parameter, on an input", x * 2);
    const auto y = linear(x);
    note("result of an operator with a parameter, on an input", y);
    note("result of a product with a parameter, on a wider tensor made in forward", wide * scale);
    note("result of a product with a parameter, on a wider buffer", table * scale);
    note("result of a matrix product with a parameter, on a wider tensor made in forward", on_wide());
    {
      const torch::NoGradGuard no_grad;
      note("result of an operator on parameters alone, without grad mode", scale.sigmoid());
    }
    note("result of a product with a parameter, on a tensor without dims", torch::tensor(2.0F) * scale);
    seen["result of a product with a parameter in `keep_in_fp32`"] = c10::toString((y * kept).scalar_type());
    const auto below_output = below(y);
    note("output of a sharded module below that is called directly", below_output);
    return below_output * scale + (y * kept).to(torch::kBFloat16).sum();
  }
  void note(const std::string& point, const Tensor& tensor) { seen[point] = name_of(tensor.scalar_type()); }

  Seen seen;
  std::string prefix;
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(4, 4))};
  torch::nn::Linear below{register_module("below", torch::nn::Linear(4, 4))};
  Tensor scale = register_parameter("scale", torch::ones({4}));
  Tensor kept = register_parameter("kept", torch::ones({4}));
  Tensor table = register_buffer("table", torch::ones({4}));
};

std::shared_ptr<Probe> sharded_probe(bool casts_inputs) {
  torch::manual_seed(0);
  auto probe = std::make_shared<Probe>();
  fully_shard(*probe->below, world_mesh(), four_dtypes(casts_inputs));
  fully_shard(*probe, world_mesh(), four_dtypes(casts_inputs));
  if (!casts_inputs) probe->prefix = "with `cast_forward_inputs = false`: ";
  return probe;
}

Tensor run(const std::shared_ptr<Probe>& probe, bool by_call, const Tensor& x) {
  const auto index = torch::arange(2, x.device());
  return by_call ? call(probe, x, index) : probe->forward(x, index);
}

/// What is added up without communication keeps 1 + 2^-10, which the parameter's dtype in forward does not.
std::string accumulation_dtype(bool by_call) {
  const auto probe = sharded_probe(true);
  for (const double gradient : {1.0, 1.0 / 1024}) {
    std::optional<NoSync> scope;
    if (gradient == 1.0) scope.emplace(*probe);
    const auto loss = [&] { return (unsharded(probe->scale).slice(0, 0, 1) * gradient).sum(); };
    (by_call ? call(probe, torch::ones({1, 4}, test_device()), torch::arange(2, test_device())).sum() * 0 + loss() : loss())
        .backward();
  }
  const auto sum = full(probe->scale.grad())[0].item<double>();
  return sum == 1 + 1.0 / 1024 ? "`reduce_dtype`" : c10::str(sum);
}

Seen measure(bool by_call) {
  auto probe = sharded_probe(true);
  fsdp(*probe).set_all_reduce_hook([&](const Tensor& reduced) { probe->note("reduced gradient", reduced); });
  unsharded(probe->scale).register_hook([&](const Tensor& gradient) {
    probe->note("gradient of a parameter, as autograd makes it", gradient);
  });
  const auto x = torch::ones({2, 4}, test_device()).set_requires_grad(true);
  const auto output = run(probe, by_call, x);
  probe->note("output", output);
  output.to(torch::kFloat).sum().backward();
  torch::optim::AdamW optimizer(probe->parameters(), 1e-3);
  optimizer.step();
  probe->note("parameter in `parameters()`, shard, state dict", probe->scale);
  probe->note("`grad()` of a parameter", probe->scale.grad());
  probe->note("`grad()` of an input", x.grad());
  auto& state = *optimizer.state().at(probe->scale.unsafeGetTensorImpl());
  probe->note("optimizer's state", static_cast<torch::optim::AdamWParamState&>(state).exp_avg());
  auto seen = probe->seen;
  seen["gradients added up without communication"] = accumulation_dtype(by_call);
  const auto uncast = sharded_probe(false);
  run(uncast, by_call, x);
  seen.merge(uncast->seen);
  return seen;
}

/// The rows of the document's table of tensors: of each point, the dtype when called directly and with `call`.
std::map<std::string, std::pair<std::string, std::string>> documented() {
  std::map<std::string, std::pair<std::string, std::string>> rows;
  std::ifstream file(TESSERA_MIXED_PRECISION_DOC);
  std::string line;
  while (std::getline(file, line) && !line.starts_with("| tensor")) continue;
  while (std::getline(file, line) && line.starts_with('|')) {
    if (line.starts_with("|-")) continue;
    std::istringstream cells(line.substr(2));
    std::array<std::string, 3> cell;
    for (auto& each : cell) {
      std::getline(cells, each, '|');
      each = each.substr(each.find_first_not_of(' '), each.find_last_not_of(' ') - each.find_first_not_of(' ') + 1);
    }
    rows[cell[0]] = {cell[1], cell[2]};
  }
  return rows;
}

TEST(Boundaries, EveryLineOfTheDocumentIsTrue) {
  if (!tests_the_cpu()) GTEST_SKIP() << "other devices find dtypes that do not fit later than in the call";
  Seen directly, by_call;
  warnings_of([&] { directly = measure(false), by_call = measure(true); });
  const auto rows = documented();
  EXPECT_EQ(rows.size(), 25U);
  for (const auto& [point, dtypes] : rows) {
    EXPECT_EQ(directly.contains(point) ? directly.at(point) : "not measured", dtypes.first) << point;
    EXPECT_EQ(by_call.contains(point) ? by_call.at(point) : "not measured", dtypes.second) << point << ", by call";
  }
  EXPECT_EQ(directly.size(), rows.size());
}

FullyShardOptions in_bf16(std::optional<torch::ScalarType> output_dtype) {
  FullyShardOptions options;
  options.mixed_precision = {.param_dtype = torch::kBFloat16, .output_dtype = output_dtype};
  return options;
}

torch::nn::Sequential two_layers(const FullyShardOptions& below, const FullyShardOptions& root) {
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(3, 3), torch::nn::Linear(3, 2));
  for (const auto& layer : *net) fully_shard(*layer.ptr(), world_mesh(), below);
  fully_shard(net, world_mesh(), root); // without parameters of its own
  return net;
}

TEST(Boundaries, AnOutputDtypeThatNothingAppliesIsAWarning) {
  const auto x = torch::ones({2, 3}, test_device());
  const auto with = in_bf16(torch::kFloat), without = in_bf16(std::nullopt);
  const auto warnings = [&](const FullyShardOptions& below, const FullyShardOptions& root, bool by_call) {
    auto net = two_layers(below, root);
    return warnings_of([&] {
      for (int i = 0; i < 3; ++i) {
        const auto y = by_call ? call(net, x) : net->forward(x);
        y.to(torch::kFloat).sum().backward();
      }
    });
  };
  EXPECT_THAT(warnings(without, without, false), ::testing::IsEmpty());
  EXPECT_THAT(warnings(with, with, true), ::testing::IsEmpty()) << "what is below is cast at the end of the call";
  EXPECT_THAT(warnings(without, with, true), ::testing::IsEmpty());
  const auto applied_nowhere = warnings(with, with, false), root_alone = warnings(without, with, false);
  const auto another_below = warnings(in_bf16(torch::kDouble), with, true);
  if (world_rank() != 0) return;
  using ::testing::AllOf, ::testing::ElementsAre, ::testing::HasSubstr;
  EXPECT_THAT(applied_nowhere, ElementsAre(HasSubstr("has the output_dtype Float, but its parameters are read outside of "
                                                     "tessera::call")));
  EXPECT_THAT(root_alone, ElementsAre(HasSubstr("the policy of torch::nn::SequentialImpl"))) << "which has no group of its own";
  EXPECT_THAT(another_below, ElementsAre(AllOf(HasSubstr("the policy of 0"), HasSubstr("the output_dtype Double"))));
}

/// A norm as LLaMA's, which multiplies in fp32.
struct RmsNorm : torch::nn::Module {
  Tensor forward(const Tensor& x) {
    const auto wide = x.to(torch::kFloat);
    return wide * torch::rsqrt(wide.square().mean(-1, true) + 1e-6) * weight;
  }
  Tensor weight = register_parameter("weight", torch::ones({3}));
};

TEST(Boundaries, AnActivationThatIsRoundedInsideACallIsAWarning) {
  const auto warnings = [](const FullyShardOptions& options, bool by_call) {
    const auto norm = std::make_shared<RmsNorm>();
    const auto x = torch::ones({2, 3}, test_device());
    fully_shard(*norm, world_mesh(), options);
    return warnings_of([&] {
      for (int i = 0; i < 2; ++i) by_call ? call(norm, x) : norm->forward(x);
    });
  };
  auto kept = in_bf16(std::nullopt), uncast = kept;
  kept.mixed_precision.keep_in_fp32 = {"weight"};
  uncast.mixed_precision.cast_forward_inputs = false;
  EXPECT_THAT(warnings(in_bf16(std::nullopt), false), ::testing::IsEmpty());
  EXPECT_THAT(warnings(kept, true), ::testing::IsEmpty());
  EXPECT_THAT(warnings(uncast, true), ::testing::IsEmpty());
  const auto rounded = warnings(in_bf16(std::nullopt), true);
  if (world_rank() == 0)
    EXPECT_THAT(rounded,
                ::testing::ElementsAre(::testing::HasSubstr(
                    "aten::mul in a tessera::call of tessera::testing::boundaries_test::(anonymous namespace)::RmsNorm")));
}

struct CoderImpl : torch::nn::Module {
  using Scaled = std::pair<Tensor, double>;
  Tensor forward(const Tensor& x) { return decode(encode(x)); }
  Tensor encode(const Tensor& x) { return torch::relu(up(x)); }
  Scaled encode(const Tensor& x, double scale) { return {encode(x) * scale, scale}; }
  Tensor decode(const Tensor& code) const { return torch::linear(code, down->weight, down->bias); }
  int64_t width() const { return down->options.in_features(); }
  void remember(const Tensor& x) { memory = down(up(x)); }
  const std::string& title() const { return text; }
  std::unique_ptr<int> moved(std::unique_ptr<int> value) { return value; }

  torch::nn::Linear up{register_module("up", torch::nn::Linear(3, 6))};
  torch::nn::Linear down{register_module("down", torch::nn::Linear(6, 3))};
  Tensor memory;
  std::string text = "coder";
};
TORCH_MODULE(Coder);

Coder sharded_coder() {
  torch::manual_seed(0);
  Coder coder;
  fully_shard(coder->down, world_mesh(), in_bf16(torch::kFloat));
  fully_shard(coder, world_mesh(), in_bf16(torch::kFloat));
  return coder;
}

TEST(Boundaries, CallTakesAnyMemberFunction) {
  auto coder = sharded_coder();
  const auto x = torch::ones({2, 3}, test_device());
  const auto encode = static_cast<Tensor (CoderImpl::*)(const Tensor&)>(&CoderImpl::encode);
  const auto scaled = static_cast<CoderImpl::Scaled (CoderImpl::*)(const Tensor&, double)>(&CoderImpl::encode);
  const auto code = call(coder, encode, x);
  EXPECT_EQ(code.scalar_type(), torch::kFloat);
  EXPECT_EQ(fsdp(*coder->down).unsharded_bytes(), 0) << "the end frees what it gathered, here by the prefetch";
  EXPECT_TENSORS_EQUAL(call(coder.ptr(), scaled, x, 2).first, code * 2);
  EXPECT_TENSORS_EQUAL(call(coder.get(), &CoderImpl::decode, code), call(coder, x));
  const Coder& same = coder;
  EXPECT_TENSORS_EQUAL(call(same, &CoderImpl::decode, code), call(coder, x)) << "a const function of a const module";
  EXPECT_EQ(call(coder, &CoderImpl::width), 6);
  call(coder, &CoderImpl::remember, x); // returns nothing
  EXPECT_EQ(coder->memory.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(&call(coder, &CoderImpl::title), &coder->text);
  EXPECT_EQ(*call(coder, &CoderImpl::moved, std::make_unique<int>(3)), 3);
  EXPECT_THROWS_WITH(call(Coder(nullptr), &CoderImpl::width), "the module is null");
  int64_t (CoderImpl::*none)() const = nullptr;
  EXPECT_THROWS_WITH(call(coder, none),
                     "the member function of tessera::testing::boundaries_test::(anonymous namespace)::CoderImpl is null");
}

/// Of a program that shards nothing, or has no process group.
TEST(Boundaries, CallsAndScopesOfAModelThatIsNotShardedArePlain) {
  Coder coder;
  const auto x = torch::ones({2, 3});
  const auto expected = coder->forward(x);
  EXPECT_TENSORS_EQUAL(call(coder, x), expected);
  EXPECT_TENSORS_EQUAL(call(coder.get(), &CoderImpl::decode, coder->encode(x)), expected);
  EXPECT_EQ(call(Coder(), &CoderImpl::width), 6);
  {
    const auto scope = forward_scope(*coder);
    EXPECT_TENSORS_EQUAL(call(coder, x), expected);
  }
  call(coder, x).sum().backward();
  EXPECT_TRUE(coder->up->weight.grad().defined());
  EXPECT_TENSORS_EQUAL(call(torch::nn::ReLU(), x), x) << "which has no parameters";
}

TEST(Boundaries, CallsOfAPartOfAShardedModuleAreErrors) {
  auto coder = sharded_coder();
  EXPECT_THROWS_WITH(call(coder->up, torch::ones({2, 3}, test_device())), "is not sharded: call fully_shard on it first");
  EXPECT_THROWS_WITH(forward_scope(*coder->up), "is not sharded: call fully_shard on it first");
  struct Above : torch::nn::Module {};
  Above above;
  above.register_module("coder", coder.ptr());
  EXPECT_THROWS_WITH(forward_scope(above), "is not sharded: call fully_shard on it first");
}

TEST(Boundaries, CallsOfMemberFunctionsTrainAsAForwardDoes) {
  const auto x = torch::ones({2, 3}, test_device()) * static_cast<double>(world_rank() + 1);
  const auto encode = static_cast<Tensor (CoderImpl::*)(const Tensor&)>(&CoderImpl::encode);
  const auto gradients = [&](const std::function<Tensor(Coder&)>& loss) {
    auto coder = sharded_coder();
    std::vector<Tensor> all;
    for (int step = 0; step < 2; ++step) {
      coder->zero_grad();
      loss(coder).backward();
    }
    for (const auto& parameter : coder->parameters()) all.push_back(full(parameter.grad()));
    return all;
  };
  const auto expected = gradients([&](Coder& coder) { return call(coder, x).square().sum(); });
  const auto parts =
      gradients([&](Coder& coder) { return call(coder, &CoderImpl::decode, call(coder, encode, x)).square().sum(); });
  const auto recomputed = gradients([&](Coder& coder) {
    const auto code = tessera::recompute([&](const Tensor& in) { return call(coder, encode, in); }, x);
    return tessera::recompute([&](const Tensor& in) { return call(coder, &CoderImpl::decode, in); }, code).square().sum();
  });
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TENSORS_CLOSE(parts[i], expected[i], 1e-5, 1e-6);
    EXPECT_TENSORS_EQUAL(recomputed[i], parts[i]);
  }
}

} // namespace
} // namespace tessera::testing::boundaries_test

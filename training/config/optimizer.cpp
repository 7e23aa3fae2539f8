// The optimizer of a config.
#include <absl/strings/ascii.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <tuple>

#include <tessera/training/config/sections.h>

namespace tessera::internal {

namespace {

using Betas = std::tuple<double, double>;

/// `optimizer.params`, with the defaults of one optimizer.
class Params {
 public:
  explicit Params(const ConfigValues& values) : values_(values) {}

  double number(const std::string& name, double standard) const {
    return values_.optional_number(key_of(name)).value_or(standard);
  }
  int64_t integer(const std::string& name, int64_t standard) const {
    return values_.has(key_of(name)) ? values_.integer(key_of(name)) : standard;
  }
  bool boolean(const std::string& name, bool standard) const {
    return values_.has(key_of(name)) ? values_.boolean(key_of(name)) : standard;
  }
  Betas betas(const Betas& standard) const {
    const auto key = key_of("betas");
    if (!values_.has(key)) return standard;
    const auto list = values_.json(key).get<std::vector<double>>();
    TORCH_CHECK_VALUE(list.size() == 2, values_.where(key), " has ", list.size(), " numbers, but must have 2");
    return {list[0], list[1]};
  }
  bool has(const std::string& name) const { return values_.has(key_of(name)); }

  template <typename Options>
  Options adam(double weight_decay) const {
    TORCH_CHECK_NOT_IMPLEMENTED(boolean("bias_correction", true), values_.where(key_of("bias_correction")),
                                " is false, which is not here: Adam's moments are corrected");
    constexpr double kLr = 1e-3, kEps = 1e-8, kBeta1 = 0.9, kBeta2 = 0.999;
    Options options(number("lr", kLr));
    options.betas(betas({kBeta1, kBeta2})).eps(number("eps", kEps)).weight_decay(number("weight_decay", weight_decay));
    return options;
  }

 private:
  static std::string key_of(const std::string& name) { return "optimizer.params." + name; }
  const ConfigValues& values_;
};

constexpr double kTorchDecay = 0.01; // of torch.optim.AdamW

OptimizerConfig adamw(const Params& params, const ConfigValues& /*values*/) {
  const double decay = params.boolean("torch_adam", false) ? kTorchDecay : 0;
  auto options = params.adam<torch::optim::AdamWOptions>(decay);
  options.amsgrad(params.boolean("amsgrad", false));
  return options;
}

OptimizerConfig adam(const Params& params, const ConfigValues& values) {
  if (params.boolean("adam_w_mode", true)) return adamw(params, values);
  auto options = params.adam<torch::optim::AdamOptions>(0);
  options.amsgrad(params.boolean("amsgrad", false));
  return options;
}

OptimizerConfig adamw_8bit(const Params& params, const ConfigValues& /*values*/) {
  return params.adam<AdamW8bitOptions>(kTorchDecay);
}

OptimizerConfig sgd(const Params& params, const ConfigValues& /*values*/) {
  constexpr double kLr = 1e-3;
  return torch::optim::SGDOptions(params.number("lr", kLr))
      .momentum(params.number("momentum", 0))
      .dampening(params.number("dampening", 0))
      .weight_decay(params.number("weight_decay", 0))
      .nesterov(params.boolean("nesterov", false));
}

OptimizerConfig adagrad(const Params& params, const ConfigValues& /*values*/) {
  constexpr double kLr = 1e-2, kEps = 1e-10;
  return torch::optim::AdagradOptions(params.number("lr", kLr))
      .lr_decay(params.number("lr_decay", 0))
      .weight_decay(params.number("weight_decay", 0))
      .initial_accumulator_value(params.number("initial_accumulator_value", 0))
      .eps(params.number("eps", kEps));
}

OptimizerConfig lamb(const Params& params, const ConfigValues& /*values*/) {
  LambOptions options(params.number("lr", LambOptions().lr()));
  options.betas(params.betas(options.betas())).eps(params.number("eps", options.eps()));
  options.weight_decay(params.number("weight_decay", 0)).bias_correction(params.boolean("bias_correction", true));
  options.min_coeff(params.number("min_coeff", options.min_coeff())).max_coeff(params.number("max_coeff", options.max_coeff()));
  return options;
}

OptimizerConfig lion(const Params& params, const ConfigValues& /*values*/) {
  constexpr double kLr = 1e-3, kBeta1 = 0.9, kBeta2 = 0.999; // DeepSpeed's; the paper's second beta is 0.99
  LionOptions options(params.number("lr", kLr));
  options.betas(params.betas({kBeta1, kBeta2})).weight_decay(params.number("weight_decay", 0));
  return options;
}

OptimizerConfig adafactor(const Params& params, const ConfigValues& /*values*/) {
  AdafactorOptions options(params.number("lr", AdafactorOptions().lr()));
  options.weight_decay(params.number("weight_decay", 0));
  return options;
}

/// What DeepSpeed's three optimizers of one bit have in common.
template <typename Options>
Options one_bit(const Params& params) {
  Options options(params.number("lr", Options().lr()));
  options.betas(params.betas(options.betas())).eps(params.number("eps", options.eps()));
  options.weight_decay(params.number("weight_decay", 0));
  return options;
}

OptimizerConfig one_bit_adam(const Params& params, const ConfigValues& /*values*/) {
  auto options = one_bit<OneBitAdamOptions>(params);
  options.freeze_step(params.integer("freeze_step", options.freeze_step()));
  return options;
}

OptimizerConfig one_bit_lamb(const Params& params, const ConfigValues& /*values*/) {
  auto options = one_bit<OneBitLambOptions>(params);
  options.freeze_step(params.integer("freeze_step", options.freeze_step()));
  options.max_coeff(params.number("max_coeff", options.max_coeff())).min_coeff(params.number("min_coeff", options.min_coeff()));
  options.coeff_beta(params.number("coeff_beta", options.coeff_beta()));
  options.factor_max(params.number("factor_max", options.factor_max()));
  options.factor_min(params.number("factor_min", options.factor_min()));
  options.factor_threshold(params.number("factor_threshold", options.factor_threshold()));
  return options;
}

OptimizerConfig zero_one_adam(const Params& params, const ConfigValues& /*values*/) {
  auto options = one_bit<ZeroOneAdamOptions>(params);
  options.var_freeze_step(params.integer("var_freeze_step", options.var_freeze_step()));
  options.var_update_scaler(params.integer("var_update_scaler", options.var_update_scaler()));
  options.local_step_scaler(params.integer("local_step_scaler", options.local_step_scaler()));
  options.local_step_clipper(params.integer("local_step_clipper", options.local_step_clipper()));
  return options;
}

OptimizerConfig muon(const Params& params, const ConfigValues& values) {
  constexpr double kMuonLr = 0.02, kAdamLr = 3e-4, kMomentum = 0.95, kEps = 1e-10, kBeta1 = 0.9, kBeta2 = 0.95;
  const double decay = params.number("weight_decay", 0);
  const bool is_original = values.text("tessera.optimizer.muon_adjust_lr") == "original";
  MuonConfig config;
  config.muon = MuonOptions(params.number("muon_lr", params.number("lr", kMuonLr)));
  config.muon.weight_decay(decay).momentum(params.number("momentum", kMomentum)).nesterov(params.boolean("nesterov", true));
  config.muon.adjust_lr(is_original ? MuonAdjustLr::kOriginal : MuonAdjustLr::kMatchRmsAdamW);
  config.adamw = MuonOptions(params.number("adam_lr", params.number("lr", kAdamLr)));
  config.adamw.weight_decay(decay).adamw_betas(params.betas({kBeta1, kBeta2})).adamw_eps(params.number("eps", kEps));
  config.others = values.texts("tessera.optimizer.muon_leaves");
  return config;
}

struct OptimizerRow {
  const char* name;
  OptimizerConfig (*make)(const Params&, const ConfigValues&);
  std::vector<std::string> params;
};

const std::vector<OptimizerRow>& optimizer_rows() {
  static const std::vector<std::string> of_adam{"lr",          "betas",      "eps",     "weight_decay",  "bias_correction",
                                                "adam_w_mode", "torch_adam", "amsgrad", "set_grad_none", "fp32_optimizer_states",
                                                "fused",       "foreach"};
  static const std::vector<OptimizerRow> rows{
      {"Adam", adam, of_adam},
      {"AdamW", adamw, of_adam},
      {"SGD", sgd, {"lr", "momentum", "dampening", "weight_decay", "nesterov", "fused", "foreach"}},
      {"Adagrad", adagrad, {"lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "foreach"}},
      {"Lamb", lamb, {"lr", "betas", "eps", "weight_decay", "bias_correction", "min_coeff", "max_coeff", "eps_inside_sqrt"}},
      {"Lion", lion, {"lr", "betas", "weight_decay", "set_grad_none"}},
      {"Muon", muon, {"lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "muon_lr", "adam_lr", "ns_method"}},
      {"OneBitAdam", one_bit_adam, {"lr", "betas", "eps", "weight_decay", "freeze_step", "cuda_aware", "comm_backend_name"}},
      {"OneBitLamb",
       one_bit_lamb,
       {"lr", "betas", "eps", "weight_decay", "freeze_step", "max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min",
        "factor_threshold", "cuda_aware", "comm_backend_name"}},
      {"ZeroOneAdam",
       zero_one_adam,
       {"lr", "betas", "eps", "weight_decay", "var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper",
        "cuda_aware", "comm_backend_name"}},
      {"Adafactor", adafactor, {"lr", "weight_decay"}},
      {"AdamW8bit", adamw_8bit, {"lr", "betas", "eps", "weight_decay"}}};
  return rows;
}

const OptimizerRow& row_of_optimizer(const ConfigValues& values) {
  constexpr auto* kType = "optimizer.type";
  const auto type = values.optional_text(kType);
  TORCH_CHECK_VALUE(type, values.where(kType), " is not given");
  std::vector<std::string> names;
  for (const auto& row : optimizer_rows()) {
    if (absl::AsciiStrToLower(row.name) == absl::AsciiStrToLower(*type)) return row;
    names.emplace_back(row.name);
  }
  TORCH_CHECK_VALUE(
      false, values.where(kType), " is ", *type, ", which is no optimizer here", nearest_name(*type, names),
      " There are Adam, AdamW, SGD, Adagrad, Lamb, Lion, Muon, OneBitAdam, OneBitLamb, ZeroOneAdam, Adafactor and AdamW8bit");
}

} // namespace

OptimizerConfig optimizer_of(const ConfigValues& values) {
  if (!values.has("optimizer")) return {};
  const auto& row = row_of_optimizer(values);
  const std::string prefix = "optimizer.params.";
  for (const auto& [key, value] : values.given()) {
    if (!key.starts_with(prefix)) continue;
    const bool is_known = std::find(row.params.begin(), row.params.end(), key.substr(prefix.size())) != row.params.end();
    TORCH_CHECK_VALUE(is_known, values.where(key), " is no parameter of ", row.name,
                      nearest_name(key.substr(prefix.size()), row.params));
  }
  return row.make(Params(values), values);
}

} // namespace tessera::internal

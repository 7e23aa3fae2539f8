// Autocast on the simulated device: the operators that CUDA's runs in the lower precision, in fp32, or in the widest dtype given.
#include <tessera/tests/support/simulated_device/autocast.h>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace tessera::testing::sim {

namespace {

using namespace at; // NOLINT(google-build-using-namespace): the macros name its types

#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define DIFFERENT_SIGNATURE(...) KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE(__VA_ARGS__)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

void register_casts(torch::Library& m) { // the name that the macros use
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(DIFFERENT_SIGNATURE)
  AT_FORALL_PROMOTE(PROMOTE)
}

} // namespace

void register_autocast() {
  using Kind = torch::Library::Kind;
  constexpr auto kKey = c10::DispatchKey::AutocastPrivateUse1;
  static auto* const others = new torch::Library(Kind::IMPL, "_", kKey, __FILE__, __LINE__);
  static auto* const casts = new torch::Library(Kind::IMPL, "aten", kKey, __FILE__, __LINE__);
  others->fallback(torch::CppFunction::makeFallthrough());
  register_casts(*casts);
}

} // namespace tessera::testing::sim

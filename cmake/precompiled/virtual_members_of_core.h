#pragma once

// For precompiled headers: the virtual members of LibTorch's class templates whose vtables its headers use. A precompiled header
// would not have their definitions, and each source that reads it would instantiate them again: an empty one took 1.6 seconds in
// place of 0.3. The calls are qualified, since a virtual call instantiates nothing. What is never called is in no object file.
// Another version of LibTorch may have other classes, which would take their time again.

#include <torch/csrc/api/include/torch/version.h>
#include <torch/csrc/jit/ir/attributes.h>
#include <torch/library.h>

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR == 11

namespace tessera::precompiled {

template <typename T>
T& some(); ///< is declared only

template <typename Type>
void instantiate_type() {
  using Base [[maybe_unused]] = c10::SingleElementType<Type::Kind, Type>;
  some<const Type>().Base::equals(some<const c10::Type>());
  some<const Type>().Base::containedTypes();
}

template <typename... Attributes>
void instantiate_attributes() {
  (void(some<const Attributes>().Attributes::clone()), ...);
}

inline void instantiate_core() {
  using namespace torch::jit; // NOLINT(google-build-using-namespace)
  instantiate_type<c10::AwaitType>();
  instantiate_type<c10::FutureType>();
  instantiate_type<c10::ListType>();
  instantiate_type<c10::RRefType>();
  instantiate_attributes<FloatAttr, FloatsAttr, IntsAttr, StringAttr, StringsAttr, TensorsAttr, TypesAttr,
                         VectorAttributeValue<c10::complex<double>, AttributeKind::cs>>();
}

} // namespace tessera::precompiled

#endif

# What every target of the project shares: warnings, sanitizers, output folders.

add_library(tessera_options INTERFACE)
target_compile_options(tessera_options INTERFACE -Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers
  -Wnon-virtual-dtor -Woverloaded-virtual $<$<BOOL:${TESSERA_WERROR}>:-Werror>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13 AND LibTorch_VERSION VERSION_GREATER 2.11)
  # GCC 12 takes the reference counts of newer LibTorch's intrusive_ptr, where they are inlined, for writes out of bounds.
  target_compile_options(tessera_options INTERFACE -Wno-stringop-overflow)
endif()

# Errors and --help name source files as they lie in the project, not on the machine that built them.
target_compile_options(tessera_options INTERFACE "-fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=")

# As LibTorch itself is built, in every configuration: without it at::RecordFunction has a member more, which LibTorch's own do not
# have, and whose value `inputs()` asserts. The release preset has it among its flags.
target_compile_definitions(tessera_options INTERFACE $<$<NOT:$<CONFIG:Release>>:NDEBUG>)

# LibTorch is not instrumented, which is what the suppressions are for.
set(TESSERA_SANITIZER_ENVIRONMENT)
if(TESSERA_SANITIZER)
  target_compile_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZER} -fno-omit-frame-pointer
    -fno-sanitize-recover=all)
  target_link_options(tessera_options INTERFACE -fsanitize=${TESSERA_SANITIZER})
  # The instrumentation hides from GCC that Abseil's inlined vectors read only what they have written.
  target_compile_options(tessera_options INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  set(TESSERA_SANITIZER_ENVIRONMENT
    "ASAN_OPTIONS=detect_stack_use_after_return=1:strict_init_order=1"
    "LSAN_OPTIONS=print_suppressions=0:suppressions='${PROJECT_SOURCE_DIR}/cmake/lsan.supp'"
    "UBSAN_OPTIONS=print_stacktrace=1"
    "TSAN_OPTIONS=ignore_noninstrumented_modules=1:second_deadlock_stack=1:suppressions='${PROJECT_SOURCE_DIR}/cmake/tsan.supp'")
endif()

# LibTorch brings fmt as headers alone: each source that formats a text would optimise fmt's functions for seconds. Here they are
# compiled once.
add_library(tessera_fmt STATIC "${CMAKE_CURRENT_LIST_DIR}/fmt_functions.cpp")
set_target_properties(tessera_fmt PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_link_libraries(tessera_fmt PRIVATE LibTorch::c10)
target_compile_options(tessera_fmt PRIVATE -UFMT_HEADER_ONLY)
if(TESSERA_SANITIZER) # the linker may take its copy of the standard library's templates for the one that all use
  target_compile_options(tessera_fmt PRIVATE -fsanitize=${TESSERA_SANITIZER} -fno-omit-frame-pointer -fno-sanitize-recover=all)
endif()
target_link_libraries(tessera_options INTERFACE tessera_fmt)
target_compile_options(tessera_options INTERFACE -UFMT_HEADER_ONLY)

# Most of a source's time goes into what many sources instantiate.
option(TESSERA_BATCHES "Compile sources of large targets together: a clean build is faster, one after a small change slower" ON)
function(tessera_compile_in_batches target size)
  if(TESSERA_BATCHES)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${size})
  endif()
endfunction()

# tessera_program(NAME SOURCES file... [LIBRARIES target...] [PRECOMPILED target]): a program in build/<preset>/bin, with the
# precompiled header of another target, and as position-independent code where that is. It loads the NCCL side, if at all, at run
# time, so that alone would not build it.
function(tessera_program name)
  cmake_parse_arguments(arg "" "PRECOMPILED" "SOURCES;LIBRARIES" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE tessera::tessera tessera_options ${arg_LIBRARIES})
  if(arg_PRECOMPILED)
    target_precompile_headers(${name} REUSE_FROM ${arg_PRECOMPILED})
    target_compile_options(${name} PRIVATE $<$<BOOL:$<TARGET_PROPERTY:${arg_PRECOMPILED},POSITION_INDEPENDENT_CODE>>:-fPIC>)
  endif()
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bin")
  if(TARGET tessera_nccl)
    add_dependencies(${name} tessera_nccl)
  endif()
endfunction()

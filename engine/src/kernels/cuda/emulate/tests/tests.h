#pragma once

// Runs one test and prints its duration.
void test(const char* name, void (*run)());

void test_linear();
void test_group();
void test_attention();
void test_head();
void test_draw();
void test_overlap();
